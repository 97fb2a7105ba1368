package main

import (
	"cmp"
	"slices"

	"github.com/anishathalye/porcupine"
)

// What an operation does to a lock, if it is carried out.
type verb int

const (
	grants  verb = iota // the owner was granted it, or had it already
	may                 // an acquire that nobody answered: it may have been granted
	renews              // the owner had it, and keeps it
	denies              // the owner does not have it, the server says
	expires             // the owner believes that its lease has ended; the server may think otherwise
	frees               // the owner had it, and has it no more
	forgoes             // the owner does not count on it any longer
	waits               // the owner is in the queue by now
	stops               // it is not any longer
	writes              // the storage was written to
)

// operation is what the model steps over: what one event says about the lock, and when that was so at the earliest and
// at the latest.
type operation struct {
	verb         verb
	owner        int64
	limit        int
	since, until int64 // of the operation
	lasts        int64 // until when the lock is the owner's at least
	fence        int64 // as its place among those of the key; of an acquire that nobody answered, what its owner is told later
	safe         bool
	came         int64 // when its owner first asked for the lock
	order        int64 // of a write
	accepted     bool
}

// onItsWay is how long it may take until who asks is in the queue, and whoever comes then certainly behind: on_its_way of
// tests/chaos/checker.rs.
func (e event) onItsWay() int64 {
	if e.By == "raw" {
		return 900_000
	}
	return 2_000_000
}

// operations gives those of each key.
func operations(h *history) map[int][]porcupine.Operation {
	came, ends, last := map[int64]int64{}, map[int64]int64{}, int64(0)
	for _, e := range h.events {
		if first, ok := came[e.Tenure]; !ok || e.Asked < first {
			came[e.Tenure] = e.Asked
		}
		last = max(last, e.Asked, e.answered(e.Asked))
		ends[e.Tenure] = max(ends[e.Tenure], e.answered(e.Asked))
	}
	events := slices.Clone(h.events)
	slices.SortStableFunc(events, func(a, b event) int { return cmp.Compare(a.Asked, b.Asked) })
	fences := map[int][]int64{}
	told := map[int64]int64{} // the fence that an owner is told of, 0 if it only hears that it has released
	for _, e := range events {
		if e.Answer == "held" {
			fences[e.Key] = append(fences[e.Key], e.Fence)
			told[e.Tenure] = e.Fence
		}
		if _, isTold := told[e.Tenure]; e.Answer == "released" && !isTold {
			told[e.Tenure] = 0
		}
	}
	for key := range fences {
		slices.Sort(fences[key])
		fences[key] = slices.Compact(fences[key])
	}
	lasts := map[int64]int64{} // of each owner, as far as it is known
	all := map[int][]porcupine.Operation{}
	for _, e := range events {
		// The order of the fences is that of the grants: so nobody has to look for it.
		place := func(fence int64) int64 {
			before, _ := slices.BinarySearch(fences[e.Key], fence)
			return int64(before) + 1
		}
		o := operation{owner: e.Tenure, limit: e.Limit, since: e.Asked, until: e.answered(last), lasts: e.Until,
			fence: place(max(e.Fence, e.Shown)), safe: e.Safe, came: came[e.Tenure]}
		add := func(what verb) {
			o.verb = what
			all[e.Key] = append(all[e.Key], porcupine.Operation{ClientId: int(e.Tenure), Input: o, Call: o.since, Return: o.until})
		}
		if queued := e.Asked + e.onItsWay(); o.until > queued && e.Did == "acquire" && e.Wait > 0 {
			answered := o
			o.since, o.until = queued, queued
			add(waits)
			o = answered
		}
		switch e.Did + " " + e.Answer {
		case "acquire held":
			lasts[e.Tenure] = e.Until
			add(grants)
		case "acquire not":
			// A wait that was in vain has lasted.
			o.since = min(o.since+e.Wait, o.until)
			add(stops)
		case "acquire failed", "acquire ":
			given := o.until
			// Nobody can tell whether it was, if its owner is never told of it.
			if fence, isTold := told[e.Tenure]; isTold {
				o.until, o.fence = max(o.until, ends[e.Tenure]), 0
				if fence > 0 {
					o.fence = place(fence)
				}
				add(may)
			}
			if e.Wait > 0 {
				o.since, o.until = given, given
				add(stops)
			}
		case "renew held":
			lasts[e.Tenure] = max(lasts[e.Tenure], e.Until)
			add(renews)
		case "check held":
			// What the helper says of its lease it has from a renewal, which was asked for a ttl before the lease ends.
			if e.Until > lasts[e.Tenure] {
				lasts[e.Tenure] = e.Until
				o.since = e.Until - h.ttl
				add(renews)
			}
		case "renew not", "release not":
			add(denies)
		case "check not":
			add(expires)
		case "release released":
			add(frees)
		case "release failed", "release ":
			add(forgoes)
		case "write accepted", "write refused":
			o.order, o.accepted = e.Order, e.Answer == "accepted"
			add(writes)
		}
	}
	return all
}

func (e event) answered(otherwise int64) int64 {
	if e.Answered == nil {
		return otherwise
	}
	return *e.Answered
}
