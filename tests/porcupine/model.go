package main

import (
	"slices"

	"github.com/anishathalye/porcupine"
)

// The lock as one sequential object, with the storage that it guards. Time is in the state: `now` is the earliest moment
// at which all steps so far can have been taken, so a step that must come after the end of a lease is refused if it was
// answered before.

const nobody = -1

// recovery is how long after a fault clients need to find the server again: RECOVERY of tests/chaos/checker.rs.
const recovery = 2_500_000

// lock is the state.
type lock struct {
	hold
	waiting []waiter
}

// hold is the part of it that is comparable.
type hold struct {
	owner  int64
	known  bool  // whether the newest fence is the owner's
	safe   bool  // whether a replica has the grant
	lasts  int64 // until when it is certainly the owner's
	fence  int64 // the newest that was granted
	now    int64
	shown  int64 // the newest fence that the storage accepted
	writer int64 // whose that was
	writes int64 // how many the storage has seen
}

// waiter is somebody who has been in the queue for so long that whoever comes now is behind.
type waiter struct{ owner, came, since int64 }

func (l lock) equal(other lock) bool {
	return l.hold == other.hold && slices.Equal(l.waiting, other.waiting)
}

// at gives the state not before a moment; false if the operation was over by then.
func (l lock) at(moment int64, o operation) (lock, bool) {
	l.now = max(l.now, o.since, moment)
	return l, l.now <= o.until
}

// without gives the state without a waiter.
func (l lock) without(owner int64) lock {
	l.waiting = slices.DeleteFunc(slices.Clone(l.waiting), func(w waiter) bool { return w.owner == owner })
	return l
}

// model is that of a lock whose leases last for ttl unless one of the faults explains their end.
type model struct {
	ttl    int64
	faults []fault
}

func (m model) between(from, to int64) func(fault) bool {
	return func(f fault) bool { return f.From <= to && f.To >= from }
}

// free is when somebody else may have been granted the lock: when its lease has ended, or a fault has forgotten or
// shortened it.
func (m model) free(l lock) int64 {
	if l.owner == nobody {
		return l.now
	}
	free := l.lasts
	for _, f := range m.faults {
		if !m.between(l.lasts-m.ttl, l.lasts)(f) {
			continue
		}
		if f.Loses && !l.safe {
			free = min(free, f.From)
		}
		free = min(free, max(l.lasts-f.Skew, f.From))
	}
	return free
}

// passes tells whether a grant to this one passes over somebody who certainly waits, without a fault that explains it.
func (m model) passes(l lock, o operation) bool {
	return slices.ContainsFunc(l.waiting, func(w waiter) bool {
		return w.owner != o.owner && w.since < o.came && !slices.ContainsFunc(m.faults, m.between(w.came-recovery, o.until))
	})
}

// step gives the states to which an operation may lead; none if it contradicts the state.
func (m model) step(l lock, o operation) []lock {
	passes, isOwner := m.passes(l, o), l.owner == o.owner
	if o.verb != waits && o.verb != may {
		l = l.without(o.owner)
	}
	next, inTime := l.at(l.now, o)
	ended, canEnd := l.at(m.free(l), o)
	ended.owner = nobody
	switch o.verb {
	case grants:
		switch {
		case isOwner && l.known:
			inTime = inTime && o.fence == l.fence
		case isOwner:
			inTime = inTime && o.fence == l.fence+1
		default:
			next, inTime = ended, canEnd && o.fence == l.fence+1 && !passes
			next.owner, next.lasts = o.owner, 0
		}
		next.fence, next.known, next.lasts, next.safe = o.fence, true, max(next.lasts, o.lasts), o.safe
	case may:
		if canEnd && !isOwner {
			granted := ended
			granted.owner, granted.known, granted.lasts, granted.safe = o.owner, false, 0, false
			return append(only(next, inTime), granted)
		}
	case renews:
		inTime = inTime && isOwner
		next.lasts = max(next.lasts, o.lasts)
	case denies:
		if isOwner {
			next, inTime = ended, canEnd
		}
	case expires:
		if isOwner {
			next, inTime = ended, canEnd
			next.owner = o.owner
		}
	case frees:
		inTime = inTime && isOwner
		next.owner = nobody
	case forgoes:
		if isOwner {
			next.lasts = 0
		}
	case waits:
		if !isOwner { // who was granted it has not heard of it yet
			next.waiting = append(slices.Clone(next.waiting), waiter{o.owner, o.came, o.since})
		}
	case writes:
		if !o.accepted && isOwner {
			next, inTime = ended, canEnd
		}
		next.writes++
		inTime = inTime && o.order == next.writes
		if o.accepted {
			inTime = inTime && (o.fence > l.shown || o.fence == l.shown && o.owner == l.writer)
			next.shown, next.writer = o.fence, o.owner
		}
	}
	return only(next, inTime)
}

func only(l lock, legal bool) []lock {
	if !legal {
		return nil
	}
	return []lock{l}
}

// judged are the kinds of violations of the first judge that contradict this model. It has no opinion on the others, on
// answers that never come or come late: a sequential object owes none.
var judged = []string{"TwoOwners", "EndedEarly", "SameFence", "OlderFence", "StorageFooled", "OwnerRefused", "PassedOver"}

func modelOf(h *history) porcupine.Model {
	m := model{h.ttl, h.faults}
	nondeterministic := porcupine.NondeterministicModel{
		Init: func() []any { return []any{lock{hold: hold{owner: nobody, writer: nobody}}} },
		Step: func(state, input, _ any) (next []any) {
			for _, each := range m.step(state.(lock), input.(operation)) {
				next = append(next, each)
			}
			return next
		},
		Equal: func(a, b any) bool { return a.(lock).equal(b.(lock)) },
	}
	return nondeterministic.ToModel()
}
