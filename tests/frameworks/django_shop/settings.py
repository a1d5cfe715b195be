import json
import os

SECRET_KEY = "not a secret"
ALLOWED_HOSTS = ["testserver"]
ROOT_URLCONF = "tests.frameworks.django_shop.urls"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", "shop.sqlite3"),
        "OPTIONS": {"timeout": 30},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = ["django_celery_results", "tests.frameworks.django_shop"]
INSTALLED_APPS += ["celery_singleton_lock.contrib.django"]

# What the admin wants.
INSTALLED_APPS += [f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "messages", "sessions")]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
STATIC_URL = "static/"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

CELERY_BROKER_URL = os.environ.get("SHOP_REDIS", "redis://localhost")
CELERY_RESULT_BACKEND = "django-db"
CELERY_SINGLETON_LOCK_URL = CELERY_BROKER_URL
CELERY_SINGLETON_LOCK_TTL = 60

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"]},
    "loggers": {"celery_singleton_lock": {"level": "INFO"}},
}
globals().update(json.loads(os.environ.get("SHOP_SETTINGS", "{}")))
