"""A lock as the object of permissions and of the admin's log, without a table."""

from typing import Any, ClassVar

from django.db import models


class _Nothing(models.Manager):
    """No rows: otherwise `dumpdata`, which asks each model for its rows, fails without the table."""

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class Lock(models.Model):
    key = models.TextField(primary_key=True)

    objects = _Nothing()

    class Meta:
        """Its permissions."""

        managed = False
        base_manager_name = "objects"
        default_permissions = ("view",)
        permissions: ClassVar = [("break_lock", "Can ask the holder of a lock to stop")]

    def __str__(self) -> str:
        return str(self.key)
