import pytest
from interrupt import Wreck, kill_during_save, newest_step

import vescale_ckpt as vc
from vescale_storage import keys, loop, refs


@pytest.fixture
def store(request):
    store = vc.open_store(f"memory://{request.node.name}")
    store.require(create=True)
    return store


def commit(store, step):
    loop.run(refs.create_ref(store.backend, "gpt", step, manifest="a" * 64, transaction="b" * 32, now=0.0))


def put_fragment(store, step):
    loop.run(store.backend.put(keys.fragment_key(f"{step:032x}", 0), [b"fragment"]))


class ScriptedJob:
    """A job whose life is a list of things to do, one at each look; a frozen job does none of them."""

    def __init__(self, *script, on_freeze=lambda: None):
        self.script = list(script)
        self.on_freeze = on_freeze
        self.log = []

    def is_running(self):
        if self.script:
            self.script.pop(0)()
        return bool(self.script)

    def freeze(self):
        self.log.append("freeze")
        self.on_freeze()

    def thaw(self):
        self.log.append("thaw")

    def kill(self):
        self.log.append("kill")


@pytest.fixture(autouse=True)
def _no_settling(monkeypatch):
    monkeypatch.setattr("interrupt.SETTLE_SECONDS", 0.0)


def nothing():
    pass


def test_killed_between_the_first_object_and_the_snapshot(store):
    job = ScriptedJob(
        lambda: put_fragment(store, 10),
        lambda: commit(store, 10),
        lambda: put_fragment(store, 20),
        lambda: commit(store, 20),
        nothing,
        lambda: put_fragment(store, 30),
        lambda: commit(store, 30),
        nothing,
    )
    assert kill_during_save(job, store, "gpt", after_step=20) == Wreck(newest_step=20, num_objects=1)
    assert job.log == ["freeze", "kill"]
    assert newest_step(store, "gpt") == 20


def test_a_save_that_ended_meanwhile_is_let_go_and_the_next_one_caught(store):
    late = iter([lambda: commit(store, 30), nothing])  # the first freeze comes too late, the second does not

    def on_freeze():
        next(late)()

    job = ScriptedJob(
        lambda: commit(store, 20),
        nothing,
        lambda: put_fragment(store, 30),
        nothing,
        lambda: put_fragment(store, 40),
        nothing,
        nothing,
        on_freeze=on_freeze,
    )
    assert kill_during_save(job, store, "gpt", after_step=20) == Wreck(newest_step=30, num_objects=1)
    assert job.log == ["freeze", "thaw", "freeze", "kill"]


def test_a_job_that_ends_first_is_not_killed(store):
    job = ScriptedJob(lambda: commit(store, 10), nothing, nothing)
    assert kill_during_save(job, store, "gpt", after_step=20) is None
    assert job.log == []


def test_no_store_has_no_newest_step():
    assert newest_step(vc.open_store("memory://nothing-here"), "gpt") is None
