from django.db import models


class Supplier(models.Model):
    state = models.TextField(default="new")
