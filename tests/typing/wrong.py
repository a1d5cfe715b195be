"""Lines that both type checkers have to refuse, each with mypy's word for the fault and pyright's one or two."""

from celery import Celery

from celery_singleton_lock import Lock, LockLost, SingletonOptions, SingletonTask

app = Celery("shop")

misspelt: SingletonOptions = {"lock_confict": "raise"}  # typeddict-unknown-key reportAssignmentType
no_policy: SingletonOptions = {"lock_on_conflict": "rase"}  # typeddict-item reportAssignmentType
no_number: SingletonOptions = {"lock_ttl": "30"}  # typeddict-item reportAssignmentType


@app.task(base=SingletonTask, **SingletonOptions(lock_confict="raise"))  # typeddict-unknown-key reportCallIssue
def sync(supplier_id: int) -> None: ...


@app.task(base=SingletonTask, **SingletonOptions(lock_mode="for_ever"))  # typeddict-item reportArgumentType
def sync_again(supplier_id: int) -> None: ...


class Sync(SingletonTask[[int], str]):
    lock_on_conflict = "rase"  # assignment reportAssignmentType
    lock_on_lost = "stop"  # assignment reportAssignmentType
    lock_ttl = "30"  # assignment reportAssignmentType

    def run(self, supplier_id: int) -> str:
        self.lock.check("now")  # call-arg reportCallIssue
        self.lock.lose("expired")  # attr-defined reportAttributeAccessIssue reportUnknownMemberType
        return str(supplier_id)


Sync().delay("seven")  # arg-type reportArgumentType
number: int = Sync()(7)  # assignment reportAssignmentType

Lock("stock", ttl="30")  # arg-type reportArgumentType
Lock("stock").timeout = "5"  # assignment reportAttributeAccessIssue
Lock("stock").acquire().release()  # union-attr reportOptionalMemberAccess
Lock("stock").__enter__().acquire()  # attr-defined reportAttributeAccessIssue reportUnknownMemberType


@Lock("stock", timeout="5")  # arg-type reportArgumentType
def count_stock(shelf: int) -> str:
    return "42"


count_stock("one")  # arg-type reportArgumentType

LockLost("key", "stolen")  # arg-type reportArgumentType
