from django.urls import path

from example_project.shop import views

app_name = "shop"
urlpatterns = [
    path("", views.home, name="home"),
    path("products/<int:pk>/order/", views.place_order, name="place-order"),
    path("orders/<int:pk>/", views.show_order, name="order"),
    path("orders/<int:pk>/approve/", views.approve, name="approve"),
]
