"""The lease core, without clock or server: every sequence of events up to a depth, at awkward ttls."""

import itertools

import pytest

from redis_lockkeeper.lease import (
    FURTHEST,
    LONGEST_ATTEMPT,
    MAX_TTL,
    Answer,
    End,
    Idle,
    Lease,
    Lose,
    Lost,
    Release,
    Renew,
    Sleep,
    Terms,
)

START = 1_000_000_000
MS = 1_000
TTLS = [100 * MS, 101 * MS, 999 * MS, 1001 * MS, 6000 * MS, 30_000 * MS, 86_400_007 * MS, MAX_TTL]


def test_it_is_renewed_at_a_third_of_the_ttl_counted_from_the_send():
    lease = Lease(Terms(6000 * MS), START, START + 1500 * MS)
    sent_at = START + 2000 * MS
    assert lease.next(START + 1999 * MS) == Sleep(sent_at)
    assert lease.next(sent_at) == Renew(6000 * MS, sent_at + 1000 * MS)
    assert lease.answered(sent_at, Answer.YES, sent_at + 900 * MS)
    assert lease.ends_at == sent_at + (6000 - 62) * MS
    assert lease.next(sent_at + 900 * MS) == Sleep(sent_at + 2000 * MS)


def test_every_quotient_is_rounded_down_to_a_microsecond():
    assert Lease(Terms(101 * MS), START, START).ends_at == START + 101_000 - 1010 - 2000
    lease = Lease(Terms(1001 * MS), START, START)
    # A third is 333,666.6 us, a 1200th 834.1 us.
    due = (START + 333_666) // 834 * 834
    assert lease.next(START) == Sleep(due)
    assert lease.next(due) == Renew(1001 * MS, due + 166_833)
    lease.answered(due, Answer.FAILED, due)
    assert lease.next(due) == Sleep(due + 16_683)


def test_nothing_is_counted_further_ahead_than_35_years():
    lease = Lease(Terms(MAX_TTL, max_hold=2**80), START, START)
    assert lease.ends_at == START + FURTHEST - FURTHEST // 100 - 2000
    lease.give_up(START + FURTHEST, START)
    assert lease.next(START) == Renew(FURTHEST, START + LONGEST_ATTEMPT)


def test_failures_are_retried_with_back_off_some_ten_times_before_the_end():
    lease, now, attempts = Lease(Terms(6000 * MS), START, START), START, []
    while not isinstance(action := lease.next(now), Lose):
        if isinstance(action, Sleep):
            now = action.until
        else:
            attempts.append((now - START) // MS)
            lease.answered(now, Answer.FAILED, now)
    assert attempts == [2000, 2100, 2300, 2700, 3200, 3700, 4200, 4700, 5200, 5700]
    assert (action.lost, now) == (Lost.EXPIRED, START + 5938 * MS)


def test_a_hung_server_leaves_room_for_four_attempts():
    lease, now, attempts = Lease(Terms(6000 * MS), START, START), START, 0
    while not isinstance(action := lease.next(now), Lose):
        if isinstance(action, Renew):
            attempts += 1
            lease.answered(now, Answer.FAILED, action.give_up_at)
            now = action.give_up_at
        else:
            now = action.until
    assert attempts == 4


def test_what_was_extended_is_not_renewed_before_the_ttl_is_what_remains():
    lease = Lease(Terms(6000 * MS), START, START)
    lease.extend(60_000 * MS, START)
    assert lease.next(START) == Renew(60_000 * MS, START + 1000 * MS)
    lease.answered(START, Answer.YES, START + 1)
    assert lease.ends_at == START + (60_000 - 602) * MS
    due = lease.ends_at - (6000 - 62) * MS
    assert lease.next(START + 1) == Sleep(due)
    assert lease.next(due) == Renew(6000 * MS, due + 1000 * MS)


def test_a_shorter_extension_counts_before_it_is_answered():
    lease = Lease(Terms(6000 * MS), START, START)
    lease.extend(1000 * MS, START)
    assert lease.next(START) == Renew(1000 * MS, START + 1000 * MS - 12 * MS)
    assert lease.ends_at == START + 988 * MS
    lease.answered(START, Answer.FAILED, START + 10)
    assert lease.ends_at == START + 988 * MS


def test_one_that_is_not_renewed_ends():
    lease = Lease(Terms(6000 * MS, renew=False), START, START)
    assert lease.next(START) == Sleep(lease.ends_at)
    assert lease.next(lease.ends_at) == Lose(Lost.EXPIRED)


def server_end(sent_at, ttl):
    """When the server ends what was carried out at `sent_at` at the earliest: it counts in whole milliseconds."""
    return sent_at + min(ttl, FURTHEST) // MS * MS


@pytest.mark.parametrize("ttl", TTLS)
@pytest.mark.parametrize("max_hold", [None, 1])
def test_no_sequence_of_events_breaks_a_promise(ttl, max_hold):
    """Explores each choice of event at each step. What the server keeps is what it was last asked for and may have
    carried out; that is counted from when it was sent, so `ends_at` must never be later.
    """
    seen = set()
    events = ["go on", "late", "renew now", "extend", "shorten", "give up", "keep"]
    answers = [Answer.YES, Answer.TAKEN, Answer.FAILED, None]
    for choice in itertools.product(events, answers, events, answers, events):
        terms = Terms(ttl, max_hold and min(ttl, FURTHEST) // 2)
        lease, now, sent, told = Lease(terms, START, START), START, None, 0
        ends = server_end(START, ttl)
        given_up = lost = False
        for step in choice:
            if step == "late":
                now = max(now, lease.ends_at)
            elif step == "renew now":
                lease.renew_now(now)
            elif step in ("extend", "shorten"):
                lease.extend(ttl * 3 if step == "extend" else max(ttl // 2, 50 * MS), now)
            elif step in ("give up", "keep"):
                lease.give_up(now if step == "give up" else now + min(ttl, FURTHEST) // 4, now)
                given_up = True
            elif isinstance(step, Answer) and sent is not None:
                # It was carried out just when it was sent, or, if it failed, perhaps.
                sent_at, asked, release = sent
                at = now + 1
                known = lease.answered(sent_at, step, at)
                if step is Answer.YES and not release:
                    ends = server_end(sent_at, asked)
                elif step is Answer.FAILED and not release:
                    ends = min(ends, server_end(sent_at, asked))
                assert not lease.answered(sent_at, step, at), "one answer is one answer"
                now, sent = at, None
                seen.add((step, known))
            for _ in range(4):
                action = lease.next(now)
                seen.add(type(action))
                if isinstance(action, Sleep):
                    assert action.until > now
                    if action.until == now + 1:
                        now += 1
                        continue
                    now = action.until if step == "go on" and sent is None and not given_up else now
                    if now != action.until:
                        break
                elif isinstance(action, (Renew, Release)):
                    assert sent is None or given_up, "one attempt at a time"
                    assert now < action.give_up_at <= now + LONGEST_ATTEMPT
                    assert not (isinstance(action, Renew) and lost and not given_up), "a lost lease is renewed"
                    if sent is not None:
                        assert not lease.answered(sent[0], Answer.YES, now), "it was forgotten"
                        seen.add("forgotten")
                    sent = (now, getattr(action, "ttl", 0), isinstance(action, Release))
                elif isinstance(action, Lose):
                    told, lost = told + 1, True
                    seen.add(action.lost)
                    assert not given_up
                else:
                    assert isinstance(action, (Idle, End))
                    break
            if not given_up and not lost:
                assert lease.ends_at <= ends, "we believe longer than the server keeps it"
                assert now < lease.ends_at or sent is not None
        assert told <= 1, "a loss is said once"
    # An empty exploration would pass too.
    assert {Sleep, Renew, Release, Lose, End, Idle, Lost.TAKEN, (Answer.YES, True), "forgotten"} <= seen
    assert (Lost.MAX_HOLD if max_hold else Lost.EXPIRED) in seen
