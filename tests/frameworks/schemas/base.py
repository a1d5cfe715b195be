"""A database that keeps which schema it is in, as that of django-tenants does, without a PostgreSQL."""

from typing import Any

from django.db.backends.sqlite3 import base


class DatabaseWrapper(base.DatabaseWrapper):  # type: ignore[misc]
    """SQLite, whose schemas are names."""

    schema_name = "public"
    include_public_schema = True

    def set_schema(self, name: str, include_public: bool = True) -> None:
        self.schema_name, self.include_public_schema = name, include_public

    def set_schema_to_public(self) -> None:
        self.set_schema("public")

    def set_tenant(self, tenant: Any, include_public: bool = True) -> None:
        self.set_schema(tenant.schema_name, include_public)
