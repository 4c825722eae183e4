from django.contrib import messages
from django.contrib.admin.views.decorators import staff_member_required
from django.db import IntegrityError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST

from example_project.shop import orders
from example_project.shop.forms import OrderForm
from example_project.shop.models import Order, Product
from loom_django import ResumeRefusedError, loom
from loom_django.models import Execution


@require_GET
def home(request: HttpRequest) -> HttpResponse:
    context = {
        "products": Product.objects.order_by("name"),
        "orders": Order.objects.all()[:20],
        "form": OrderForm(),
    }
    return render(request, "shop/home.html", context)


@require_POST
def place_order(request: HttpRequest, pk: int) -> HttpResponse:
    product = get_object_or_404(Product, pk=pk)
    form = OrderForm(request.POST)
    if not form.is_valid():
        return render(request, "shop/refused.html", {"reason": form.errors.as_text()}, status=400)
    try:
        order = orders.place(product, **form.cleaned_data)
    except IntegrityError:
        reason = f"{product.name} is sold out. Nothing was ordered."
        return render(request, "shop/refused.html", {"reason": reason}, status=409)
    return redirect("shop:order", order.pk)


@require_GET
def show_order(request: HttpRequest, pk: int) -> HttpResponse:
    order = get_object_or_404(Order, pk=pk)
    execution = Execution.objects.filter(pk=order.execution_id).first()
    return render(request, "shop/order.html", {"order": order, "execution": execution})


@require_POST
@staff_member_required
def approve(request: HttpRequest, pk: int) -> HttpResponse:
    order = get_object_or_404(Order, pk=pk)
    try:
        loom.resume(order.execution_id, event_type="Approval", principal=request.user)
    except ResumeRefusedError as exc:  # answered already, timed out, or not there yet
        messages.error(request, str(exc))
    return redirect("shop:order", pk)
