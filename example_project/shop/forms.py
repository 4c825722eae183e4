from django import forms

from example_project.provider.server import ACCOUNTS


class OrderForm(forms.Form):
    customer = forms.CharField(label="Your name", max_length=100, initial="Ada")
    iban = forms.ChoiceField(label="The seller's account is with", choices=list(ACCOUNTS.items()))
