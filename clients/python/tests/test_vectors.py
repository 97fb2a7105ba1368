"""The lease does what the Rust lease did when it was recorded, to the microsecond."""

import json
from pathlib import Path

import pytest

from redis_lockkeeper.lease import Answer, End, Idle, Lease, Lose, Release, Renew, Sleep, Terms

VECTORS = Path(__file__).resolve().parents[2] / "conformance/vectors/lease.jsonl"

NAMES = {Sleep: "sleep", Idle: "idle", Renew: "renew", Release: "release", Lose: "lose", End: "end"}


def begin(path):
    terms = Terms(path["ttl_us"], path["max_hold_us"])
    if path["begins"] == "in_doubt":
        return Lease.in_doubt(terms, path["now"])
    return Lease(terms, path["sent_at"], path["now"])


def carry_out(lease, step):
    (what, *args), at = step["event"], step["at"]
    if what == "answered":
        assert lease.answered(args[0], Answer(args[1]), at) == step["awaited"]
    elif what == "give_up":
        lease.give_up(args[0], at)
    elif what == "renew_now":
        lease.renew_now(at)
    elif what == "extend":
        lease.extend(args[0], at)
    action = lease.next(at)
    return [NAMES[type(action)], *action]


@pytest.mark.skipif(not VECTORS.exists(), reason="the recordings are in the repository only")
def test_every_recording_is_replayed():
    paths = [json.loads(line) for line in VECTORS.read_text().splitlines()]
    assert len(paths) > 100
    for number, path in enumerate(paths, 1):
        lease = begin(path)
        for step in path["steps"]:
            action = carry_out(lease, step)
            found = {"action": action, "ends_at": lease.ends_at, "failures": lease.failures}
            found.update(lost=lease.lost, given_up=lease.given_up)
            expected = {name: step[name] for name in found}
            assert found == expected, f"recording {number}, {step}"
