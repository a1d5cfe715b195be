"""Where the catalogues come from, and what stands for the locks in the admin."""

from django.db import models


class Supplier(models.Model):
    state = models.TextField(default="new")


class SingletonLock(models.Model):
    class Meta:
        managed = False  # there is no table
        default_permissions = ()
        permissions = (("view_locks", "Can see the locks"), ("break_locks", "Can ask the holder of a lock to stop"))
