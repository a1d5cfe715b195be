"""The shop's tasks."""

from celery import Task

from celery_singleton_lock import SingletonTask
from example_project.app import LOCKED, app, database
from example_project.stage.recorder import recorded

# SHOP_LOCK=off is the same shop on plain Celery tasks, which ignore every lock_ option.
Base = SingletonTask if LOCKED else Task


@app.task(base=Base, bind=True)
def import_catalog(self, supplier):
    """Suppliers send the same file again and again; while one is being read, reading it again is needless."""
    with recorded(self) as work:
        work(2.4)
        database.incr(f"imports:{supplier}")


@app.task(base=Base, bind=True)
def sync_prices(self):
    """Beat sends this task every 1.5 s. It takes longer, so without a lock the runs would pile up."""
    with recorded(self) as work:
        work(2.2)


@app.task(base=Base, bind=True, lock_on_conflict="raise")
def send_invoice(self, order):
    """A person who clicks a second time has to know that the invoice is being sent."""
    with recorded(self) as work:
        work(1.2)
        database.incr(f"mails:{order}")


@app.task(base=Base, bind=True, acks_late=True, lock_key=["article"], lock_on_conflict="reschedule")
def book_delivery(self, article, pieces):
    """Every delivery counts, so a call waits until the key is free."""
    with recorded(self) as work:
        on_shelf = int(database.get(f"shelf:{article}") or 0)
        work(1.5)
        database.set(f"shelf:{article}", on_shelf + pieces)


@app.task(base=Base, bind=True, lock_key=(), lock_on_conflict="rerun")
def rebuild_index(self, change):
    """However many changes come during a run, one more run is enough: that of the newest change."""
    with recorded(self) as work:
        work(1.0)
        database.set("index", change)
