from typing import Any

from celery import Celery, Task, shared_task
from flask import Flask, current_app

from celery_singleton_lock import SingletonTask
from tests.frameworks.feed import pages


class FlaskTask(Task):
    flask_app: Flask

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.flask_app.app_context():
            return self.run(*args, **kwargs)


class SingletonFlaskTask(SingletonTask, FlaskTask):
    abstract = True


def celery_init_app(app: Flask) -> Celery:
    FlaskTask.flask_app = app
    celery_app: Celery = Celery(app.name, task_cls=FlaskTask)
    celery_app.config_from_object(app.config["CELERY"])
    celery_app.set_default()
    app.extensions["celery"] = celery_app
    return celery_app


@shared_task(base=SingletonFlaskTask, lock_key=("supplier_id",))
def import_catalogue(supplier_id: int) -> str:
    list(pages(supplier_id))
    return f"imported, prices in {current_app.config['CURRENCY']}"


def create_app() -> Flask:
    app = Flask(__name__)
    app.config.from_mapping(
        CURRENCY="EUR", CELERY={"broker_url": "redis://localhost", "result_backend": "redis://localhost"}
    )
    app.config.from_prefixed_env()
    celery_init_app(app)

    @app.post("/suppliers/<int:supplier_id>/import")
    def start(supplier_id: int) -> tuple[dict[str, str], int]:
        return {"task_id": import_catalogue.delay(supplier_id).id}, 202

    @app.get("/imports/<task_id>")
    def state(task_id: str) -> dict[str, str]:
        result = import_catalogue.AsyncResult(task_id)
        return {"state": result.state, "result": str(result.result)}

    return app


flask_app = create_app()
celery_app = flask_app.extensions["celery"]
