package main

import (
	"slices"

	"github.com/anishathalye/porcupine"
)

// The lock as one sequential object, with the storage that it guards. Time is in the state: `now` is the earliest moment
// at which all steps so far can have been taken, so a step that must come after the end of a lease is refused if it was
// answered before.

// recovery is how long after a fault clients need to find the server again: RECOVERY of tests/chaos/checker.rs.
const recovery = 2_500_000

// lock is the state.
type lock struct {
	summary
	holders []holder
	waiting []waiter
}

// summary is the part of it that is comparable.
type summary struct {
	fence  int64 // the newest that was granted
	now    int64
	shown  int64 // the newest fence that the storage accepted from an owner who was to be alone
	writer int64 // whose that was
	writes int64 // how many the storage has seen
}

// holder is one of those who hold it.
type holder struct {
	owner int64
	limit int
	fence int64 // 0: nobody has heard of it, ever
	safe  bool  // whether a replica has the grant
	lasts int64 // until when it is certainly the owner's
}

// waiter is somebody who has been in the queue for so long that whoever comes now is behind.
type waiter struct{ owner, came, since int64 }

func (l lock) equal(other lock) bool {
	return l.summary == other.summary && slices.Equal(l.holders, other.holders) && slices.Equal(l.waiting, other.waiting)
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

// free is when the place of this one may have been granted to somebody else: when its lease has ended, or a fault has
// forgotten or shortened it.
func (m model) free(h holder) int64 {
	free := h.lasts
	for _, f := range m.faults {
		if !m.between(h.lasts-m.ttl, h.lasts)(f) {
			continue
		}
		if f.Loses && !h.safe {
			free = min(free, f.From)
		}
		free = min(free, max(h.lasts-f.Skew, f.From))
	}
	return free
}

// ended gives the state without a holder; false if its lease cannot have ended in time.
func (m model) ended(l lock, place int, o operation) (lock, bool) {
	l, inTime := l.at(m.free(l.holders[place]), o)
	l.holders = slices.Delete(slices.Clone(l.holders), place, place+1)
	return l, inTime
}

// granted gives the states in which this one holds it beside whom it and they allow. The leases of others have ended for that,
// of no more than it takes, and only of those from a place on.
func (m model) granted(l lock, from int, h holder, o operation) (states []lock) {
	holders := append(slices.Clone(l.holders), h)
	if slices.MinFunc(holders, func(a, b holder) int { return a.limit - b.limit }).limit >= len(holders) {
		l.holders = holders
		return []lock{l}
	}
	for place := from; place < len(l.holders); place++ {
		if next, canEnd := m.ended(l, place, o); canEnd {
			states = append(states, m.granted(next, place, h, o)...)
		}
	}
	return states
}

// passes tells whether a grant to this one passes over somebody who certainly waits, without a fault that explains it.
func (m model) passes(l lock, o operation) bool {
	return slices.ContainsFunc(l.waiting, func(w waiter) bool {
		return w.owner != o.owner && w.since < o.came && !slices.ContainsFunc(m.faults, m.between(w.came-recovery, o.until))
	})
}

// step gives the states to which an operation may lead; none if it contradicts the state.
func (m model) step(l lock, o operation) []lock {
	passes := m.passes(l, o)
	if o.verb != waits && o.verb != may {
		l = l.without(o.owner)
	}
	next, inTime := l.at(l.now, o)
	next.holders = slices.Clone(l.holders)
	own := slices.IndexFunc(l.holders, func(h holder) bool { return h.owner == o.owner })
	isOwner := own >= 0
	granted := holder{o.owner, o.limit, o.fence, o.safe, o.lasts}
	switch o.verb {
	case grants:
		if isOwner && l.holders[own].fence == o.fence {
			granted.lasts = max(granted.lasts, l.holders[own].lasts)
			next.holders[own] = granted
			break
		}
		if isOwner {
			next, inTime = m.ended(l, own, o)
		}
		next.fence++
		if !inTime || passes || o.fence != next.fence {
			return nil
		}
		return m.granted(next, 0, granted, o)
	case may:
		states := only(next, inTime)
		if o.fence > 0 {
			next.fence++
			inTime = inTime && o.fence == next.fence
		}
		if isOwner || !inTime {
			return states
		}
		return append(states, m.granted(next, 0, granted, o)...)
	case renews:
		inTime = inTime && isOwner
		if isOwner {
			next.holders[own].lasts = max(next.holders[own].lasts, o.lasts)
		}
	case denies:
		if isOwner {
			next, inTime = m.ended(l, own, o)
		}
	case expires:
		if isOwner {
			next, inTime = next.at(m.free(l.holders[own]), o)
		}
	case frees:
		inTime = inTime && isOwner
		if isOwner {
			next.holders = slices.Delete(next.holders, own, own+1)
		}
	case forgoes:
		if isOwner {
			next.holders[own].lasts = 0
		}
	case waits:
		if !isOwner { // who was granted it has not heard of it yet
			next.waiting = append(slices.Clone(next.waiting), waiter{o.owner, o.came, o.since})
		}
	case writes:
		if !o.accepted && isOwner {
			next, inTime = m.ended(l, own, o)
		}
		next.writes++
		inTime = inTime && o.order == next.writes
		if o.accepted {
			inTime = inTime && (o.fence > l.shown || o.fence == l.shown && o.owner == l.writer)
			if o.limit == 1 {
				next.shown, next.writer = o.fence, o.owner
			}
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
var judged = []string{"TooMany", "EndedEarly", "SameFence", "OlderFence", "StorageFooled", "OwnerRefused", "PassedOver"}

func modelOf(h *history) porcupine.Model {
	m := model{h.ttl, h.faults}
	nondeterministic := porcupine.NondeterministicModel{
		Init: func() []any { return []any{lock{}} },
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
