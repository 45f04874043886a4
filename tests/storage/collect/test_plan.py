from __future__ import annotations

import pytest

from vescale_storage.backend import Leftover, ObjectInfo
from vescale_storage.collect.gc_objects import GcListing
from vescale_storage.collect.marks import Mark, Sweep, mark_key, sweep_key
from vescale_storage.collect.plan import CollectionPlan, Found, Tally, plan_collection
from vescale_storage.collect.roots import Roots
from vescale_storage.keys import index_key, manifest_key, pack_key
from vescale_storage.transaction_objects import TransactionInfo

NOW = 100_000.0
GRACE = 1000.0
A, B, C, D = ("aa" * 32, "bb" * 32, "cc" * 32, "dd" * 32)


def info(key: str, age: float, size: int = 10) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=size, modified_seconds=NOW - age)


def mark(name: str, age: float, packs=(), manifests=(), grace: float = GRACE) -> Mark:
    return Mark(name, NOW - age, grace, frozenset(packs), frozenset(manifests))


def plan(
    packs=(), manifests=(), hints=(), live=(), marks=(), sweeps=(), transactions=(), leftovers=(), grace=GRACE, **gc
) -> CollectionPlan:
    """Plan over packs given as (name, age); ``live`` are needed by the one manifest ``D``."""
    roots = Roots((), (), {D: frozenset(live)}, frozenset(live))
    found = Found()
    for name, age in packs:
        found.add_pack(info(pack_key(name), age), roots)
    for name, age in manifests:
        found.add_manifest(info(manifest_key(name), age), roots)
    for name, age in hints:
        found.add_hint(info(index_key(name), age), roots)
    listing = GcListing(marks={m.name: m for m in marks}, sweeps={s.mark: s for s in sweeps}, **gc)
    return plan_collection(
        found, roots, listing, transactions=transactions, leftovers=leftovers, now=NOW, grace_seconds=grace
    )


def names(doomed) -> list[str]:
    return [each.name for each in doomed]


def test_live_ones_are_counted_and_left():
    made = plan(packs=[(A, 5000), (B, 5)], manifests=[(D, 5000)], live=[A, B])
    assert (made.live_packs, made.live_manifests) == (Tally(2, 20), Tally(1, 10))
    assert made.is_empty
    assert made.missing == ()


def test_unreachable_ones_are_marked_when_they_are_older_than_the_grace_period():
    made = plan(packs=[(A, 1000), (B, 999.9)], manifests=[(C, 2000)])
    assert names(made.to_mark) == [A, C]
    assert [each.kind for each in made.to_mark] == ["pack", "manifest"]
    assert made.young == Tally(1, 10)
    assert made.deletable == Tally()
    assert not made.is_empty


def test_a_pack_and_a_manifest_of_one_name_are_two_objects():
    made = plan(packs=[(D, 5000)], manifests=[(D, 5000)])
    assert [(each.kind, each.name) for each in made.to_mark] == [("pack", D)]
    assert made.live_manifests == Tally(1, 10)


def test_what_was_marked_a_grace_period_ago_is_due():
    made = plan(packs=[(A, 5000), (B, 5000)], marks=[mark("m", 1000, [A])])
    assert [(due.mark.name, names(due.objects)) for due in made.due] == [("m", [A])]
    assert names(made.to_mark) == [B]
    assert made.deletable == Tally(1, 10)


def test_what_was_marked_later_waits():
    made = plan(packs=[(A, 5000)], marks=[mark("m", 999, [A])])
    assert (made.due, made.to_mark, made.waiting) == ((), (), Tally(1, 10))
    assert made.next_due_seconds == NOW + 1
    assert made.is_empty


def test_what_is_needed_again_is_not_due():
    made = plan(packs=[(A, 5000)], live=[A], marks=[mark("m", 1000, [A])])
    assert [names(due.objects) for due in made.due] == [[]]
    assert made.live_packs == Tally(1, 10)


def test_what_was_put_since_it_was_marked_is_not_due():
    made = plan(packs=[(A, 1000)], marks=[mark("m", 1001, [A])])
    assert [names(due.objects) for due in made.due] == [[]]
    assert names(made.to_mark) == [A]


def test_a_mark_that_somebody_acts_on_is_not_acted_on_again():
    made = plan(packs=[(A, 5000)], marks=[mark("m", 1000, [A])], sweeps=[Sweep("m", NOW - 1, GRACE, "")])
    assert made.due == ()
    assert names(made.to_mark) == [A], "what it leaves is marked anew"


@pytest.mark.parametrize(
    ("own", "marks_grace", "age", "outcome"),
    [
        (100, 1000, 150, "anew"),  # its own grace period is not over, but ours may be shorter
        (100, 1000, 1000, "due"),
        (1000, 100, 150, "waits"),
        (1000, 100, 1000, "due"),
    ],
)
def test_the_longer_grace_period_counts(own, marks_grace, age, outcome):
    made = plan(packs=[(A, 5000)], marks=[mark("m", age, [A], grace=marks_grace)], grace=own)
    assert {
        "anew": names(made.to_mark) == [A],
        "due": [names(due.objects) for due in made.due] == [[A]],
        "waits": made.waiting == Tally(1, 10),
    }[outcome]


def test_two_marks_of_one_object_delete_it_once():
    made = plan(packs=[(A, 5000)], marks=[mark("m", 2000, [A]), mark("n", 1500, [A]), mark("o", 5, [A])])
    assert [names(due.objects) for due in made.due] == [[A], []]
    assert made.waiting == Tally()


def test_a_mark_goes_when_nobody_can_be_acting_on_it_any_more():
    over, fresh = Sweep("m", NOW - 2000, GRACE, ""), Sweep("n", NOW - 1999, GRACE, "")
    made = plan(marks=[mark("m", 4000), mark("n", 4000)], sweeps=[over, fresh])
    assert made.finished == (mark_key("m"), sweep_key("m")), "the mark before its sweep record"
    assert plan(sweeps=[over]).finished == (mark_key("m"), sweep_key("m")), "a crash left the second alone"


def test_a_damaged_mark_is_claimed_and_then_goes_the_same_way():
    assert plan(damaged=["m"]).damaged_marks == ("m",)
    assert not plan(damaged=["m"]).is_empty
    made = plan(damaged=["m"], sweeps=[Sweep("m", NOW - 2000, GRACE, "")])
    assert (made.damaged_marks, made.finished) == ((), (mark_key("m"), sweep_key("m")))


def test_transactions_leftovers_and_clocks_go_when_they_are_old():
    transactions = [TransactionInfo("1" * 32, 1, 0, 7, NOW - 1000), TransactionInfo("2" * 32, 1, 0, 7, NOW - 999)]
    leftovers = [Leftover(name=str(age), key="", size_bytes=3, modified_seconds=NOW - age) for age in (999, 1000)]
    clocks = [info("gc/clock-1", 1000), info("gc/clock-2", 999)]
    made = plan(transactions=transactions, leftovers=leftovers, clocks=clocks)
    assert made.transactions == tuple(transactions[:1])
    assert [each.name for each in made.leftovers] == ["1000"]
    assert made.finished == ("gc/clock-1",)


def test_index_objects_go_with_their_manifest_when_they_are_old():
    made = plan(hints=[(A, 1000), (B, 999), (D, 5000)])
    assert [each.key for each in made.hints] == [index_key(A)]
    assert not made.is_empty


def test_packs_that_are_needed_and_not_there_are_told():
    assert plan(packs=[(A, 1)], live=[A, B]).missing == (B,)


def test_keys_that_nobody_makes_are_told_and_left():
    found = Found()
    roots = Roots((), (), {}, frozenset())
    found.add_pack(info(f"packs/bb/{A}", 5000), roots)
    found.add_manifest(info("manifests/x", 5000), roots)
    listing = GcListing(strange=["gc/x"])
    made = plan_collection(found, roots, listing, transactions=(), leftovers=(), now=NOW, grace_seconds=GRACE)
    assert made.strange == (f"packs/bb/{A}", "manifests/x", "gc/x")
    assert made.is_empty


def test_without_a_grace_period_what_is_marked_is_deleted_in_the_same_call():
    made = plan(packs=[(A, 0), (B, 5)], grace=0.0)
    assert names(made.to_mark) == [A, B]
    assert made.deletable == Tally(2, 20)
