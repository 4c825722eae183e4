from django.contrib import admin

from example_project.shop.models import Booking, Order, Product
from loom_django.admin import ExecutionsInlineMixin


class BookingInline(admin.TabularInline):
    model = Booking
    extra = 0
    can_delete = False
    readonly_fields = ["amount", "text"]


@admin.register(Order)
class OrderAdmin(ExecutionsInlineMixin, admin.ModelAdmin):
    list_display = ["pk", "product", "customer", "amount", "state", "created_at"]
    list_filter = ["state"]
    readonly_fields = ["state", "transfer_id"]
    inlines = [BookingInline]


@admin.register(Product)
class ProductAdmin(admin.ModelAdmin):
    list_display = ["name", "price", "stock"]
