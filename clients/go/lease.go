package lockkeeper

// This file is the core: the holder's view of its lease. No clock, no I/O: lease.next is told what time
// it is and says what to do; whoever carries that out reports back with lease.answered.
//
// What always holds, whatever is answered and however late:
//
//  1. endsAt is never later than the end the server keeps for this owner.
//  2. A lease that was lost or given up is never renewed again.
//  3. A loss is said exactly once, and by silence no later than the first look after endsAt.
//
// All times are whole microseconds since boot, and every quotient of a ttl is rounded down to one before it is
// used, so that helpers in all languages count the same to the microsecond.

const (
	millisecond = 1_000
	second      = 1_000_000

	// minTTL is the shortest ttl that is taken: a sixth of a shorter one, for an attempt, is less than what one
	// exchange over a network with a busy machine at either end may need.
	minTTL = 100 * millisecond

	// maxTTL is the longest that the module takes.
	maxTTL = (1<<53 - 1) * millisecond

	// furthest is how far ahead anything is counted, 35 years: a sum with the time since boot then stays below
	// 2^53, up to which the numbers of JavaScript are exact.
	furthest = 1 << 50

	// longestAttempt bounds one attempt, one try and the release that a caller waits for, whatever the ttl: a
	// server that has not answered by then will not.
	longestAttempt = 5 * second

	// releaseBackOff is the first pause after a release that failed: its caller is waiting, and the likely reason
	// is a connection that broke long ago.
	releaseBackOff = 500 * millisecond
)

// Why tells why a lock is not held any longer.
type Why string

const (
	// Taken: the server says that another owner holds it.
	Taken Why = "taken"
	// Gone: the server says that nobody holds it: it was deleted, evicted, or had run out; or Close gave it back.
	Gone Why = "gone"
	// Expired: no renewal was acknowledged in time, so the lease has ended by our own clock. Told before the
	// server can give the lock to another.
	Expired Why = "expired"
	// MaxHold: it was held as long as it may be, and is not renewed any more.
	MaxHold Why = "max_hold"
)

// terms are what the holder agreed to, in microseconds.
type terms struct {
	ttl     int64
	maxHold int64 // 0: for ever
	noRenew bool  // the lease just ends
}

func counted(duration int64) int64 { return min(duration, furthest) }

// margin is how much earlier than the server we let the lease end: one per cent for two clocks that run at
// different speeds, and 2 ms because the server counts in whole milliseconds.
func (t terms) margin() int64 { return counted(t.ttl)/100 + 2*millisecond }

func (t terms) lasts() int64 { return max(0, counted(t.ttl)-t.margin()) }

// endsAt is until when a lease may be believed that was asked for at sentAt. Counted from before the request left,
// so that a slow reply can only make us stop too early, never too late.
func (t terms) endsAt(sentAt int64) int64 { return sentAt + t.lasts() }

// renewAt is when to renew what was asked for at sentAt: at a third of the ttl, or up to a 1200th of it sooner, so
// that the renewals of many locks fall on the same moments and travel together.
func (t terms) renewAt(sentAt int64) int64 {
	due := sentAt + counted(t.ttl)/3
	return due - due%max(1, counted(t.ttl)/1200)
}

// renewExtendedAt is when to renew a lease that was extended until endsAt: when the ttl is what remains. Sooner, a
// renewal would cut the lease to the ttl again.
func (t terms) renewExtendedAt(endsAt int64) int64 { return max(0, endsAt-t.lasts()) }

// attempt is the longest that one attempt may take: four of them fit between the first, at a third of the ttl,
// and the end.
func (t terms) attempt() int64 { return min(counted(t.ttl)/6, longestAttempt) }

// isStale tells whether so much of the lease is gone that a holder should renew before it begins to work.
func (t terms) isStale(sentAt, now int64) bool {
	return t.endsAt(sentAt)-now < counted(counted(t.ttl)*2/3)
}

// backOff is how long to wait after so many failures in a row, so that a server that is down is asked some ten
// times before the lease ends and not thousands of times.
func (t terms) backOff(failures int, first int64) int64 {
	first = min(first, counted(t.ttl)/60)
	return min(first<<min(max(0, failures-1), 20), counted(t.ttl)/12)
}

type verb int

const (
	sleep   verb = iota // nothing before at
	idle                // nothing until the holder speaks
	renew               // send RENEW with ttl and report the answer, by at at the latest
	release             // send RELEASE and report the answer, by at at the latest
	lose                // tell the holder, once
	end                 // forget this lease
)

// action is what is to be done now.
type action struct {
	verb verb
	at   int64
	ttl  int64
	why  Why
}

// answer is how an attempt ended.
type answer int

const (
	failed answer = iota // nobody answered, or with an error: whether it was carried out is not known
	yes
	taken // the server said no, which is final, as is:
	gone
)

var refusals = map[answer]Why{taken: Taken, gone: Gone}

type state int

const (
	held         state = iota
	refused            // by the server, and the holder has not been told yet
	lost               // the holder was told, and has not let go yet
	givingUp           // the holder has let go
	givingUpOnce       // the same, but it may be another's by now: one attempt
	ended
)

// lease is one lease, from the grant to its end.
type lease struct {
	terms     terms
	state     state
	endsAt    int64 // until when the holder may believe that the lock is its own
	holdUntil int64 // 0: for ever
	dueAt     int64 // when the next attempt is due
	notBefore int64 // the lock is to be kept until then, although it is given up
	failures  int   // in a row, since the server last answered
	lost      Why   // the loss that the holder was told, or will be when it lets go
	refusal   Why
	// releaseInDoubt: a release was sent and nobody answered, so it may have been carried out.
	releaseInDoubt bool

	inFlight  bool
	sentAt    int64 // names the attempt in flight, so that a late answer to an earlier one is told apart
	sentTTL   int64 // of a renewal; 0 of a release
	extension int64 // the ttl of the next renewal, if it is to be another than agreed
}

// granted is a lease that was asked for at sentAt and is known at now.
func granted(t terms, sentAt, now int64) lease {
	l := lease{terms: t, endsAt: t.endsAt(sentAt), dueAt: t.renewAt(sentAt)}
	if t.noRenew {
		l.dueAt = sentAt + furthest
	}
	if t.maxHold > 0 {
		l.holdUntil = now + counted(t.maxHold)
	}
	return l
}

// inDoubt is a lease of which nobody knows whether it was granted: only good for giving it up. Whatever the server
// granted ends by itself one ttl from now.
func inDoubt(t terms, now int64) lease {
	l := granted(t, now, now)
	l.giveUp(now, now)
	return l
}

func (l *lease) isGivenUp() bool { return l.state >= givingUp }

// renewNow: the holder wants to hear from the server now.
func (l *lease) renewNow(now int64) { l.dueAt = min(l.dueAt, now) }

// extend: the holder wants the lease to last for ttl from now, this once.
func (l *lease) extend(ttl, now int64) {
	l.extension = counted(ttl)
	l.renewNow(now)
}

// giveUp: the holder lets go, but wants the lock kept until notBefore. An attempt in flight is forgotten.
func (l *lease) giveUp(notBefore, now int64) {
	if l.isGivenUp() {
		return
	}
	if l.state == refused {
		l.lost = l.refusal
	} else if l.state == held && now >= l.endsAt {
		l.lost = Expired
	}
	l.dueAt = now
	// Never at the moment of the attempt that is forgotten, whose answer has this name.
	if l.inFlight && l.sentAt >= now {
		l.dueAt = l.sentAt + 1
	}
	l.inFlight, l.failures, l.notBefore = false, 0, notBefore
	switch {
	case l.lost == Taken || l.lost == Gone:
		l.state = ended // the server would say no: there is nothing of ours to release
	case l.lost == "" || l.lost == MaxHold && now < l.endsAt:
		l.state = givingUp
	default:
		// Should the server still keep it for us, it is freed.
		l.state, l.notBefore, l.endsAt = givingUpOnce, now, now+l.terms.attempt()
	}
}

// next says what to do at now. An action is given once; asking again gives what comes after it.
func (l *lease) next(now int64) action {
	switch l.state {
	case held:
		return l.keep(now)
	case refused:
		return l.lose(l.refusal)
	case lost:
		return action{verb: idle}
	case ended:
		return action{verb: end}
	}
	return l.letGo(now)
}

func (l *lease) keep(now int64) action {
	if now >= l.endsAt {
		return l.lose(Expired)
	}
	if l.holdUntil != 0 && now >= l.holdUntil {
		return l.lose(MaxHold)
	}
	if quiet := l.quietUntil(); l.inFlight || now < quiet {
		return action{verb: sleep, at: quiet}
	}
	ttl := counted(l.terms.ttl)
	if l.extension != 0 {
		ttl = l.extension
	}
	// A shorter one than what remains counts at once: it may be carried out unheard.
	l.endsAt = min(l.endsAt, terms{ttl: ttl}.endsAt(now))
	return l.attempt(renew, now, ttl)
}

// quietUntil is until when there is nothing to do for a lease that is held, if nobody speaks.
func (l *lease) quietUntil() int64 {
	until := l.endsAt
	if l.holdUntil != 0 {
		until = min(until, l.holdUntil)
	}
	if !l.inFlight {
		until = min(until, l.dueAt)
	}
	return until
}

func (l *lease) letGo(now int64) action {
	switch {
	case now >= l.endsAt: // the server has let it go by itself
		l.state = ended
		return action{verb: end}
	case l.inFlight:
		return action{verb: sleep, at: l.endsAt}
	case now < l.dueAt:
		return action{verb: sleep, at: min(l.dueAt, l.endsAt)}
	case l.notBefore > now:
		return l.attempt(renew, now, l.notBefore-now)
	}
	return l.attempt(release, now, 0)
}

func (l *lease) attempt(what verb, now, ttl int64) action {
	l.inFlight, l.sentAt, l.sentTTL = true, now, ttl
	return action{verb: what, ttl: ttl, at: min(now+l.terms.attempt(), l.endsAt)}
}

func (l *lease) lose(why Why) action {
	l.state, l.lost = lost, why
	return action{verb: lose, why: why}
}

// answered: the attempt that was begun at sentAt has ended. False if nobody waits for it any more.
func (l *lease) answered(sentAt int64, a answer, now int64) bool {
	if !l.inFlight || l.sentAt != sentAt {
		return false
	}
	l.inFlight = false
	switch {
	case l.state == givingUpOnce, l.state == givingUp && a != failed:
		l.state = ended
	case l.state == givingUp:
		l.releaseInDoubt = l.releaseInDoubt || l.sentTTL == 0
		l.failures++
		l.dueAt = now + l.terms.backOff(l.failures, releaseBackOff)
	case a == failed:
		l.failures++
		l.dueAt = now + l.terms.backOff(l.failures, furthest)
	case l.state == held && a != yes:
		// Said by next, so that there is one place where a loss is told.
		l.state, l.refusal = refused, refusals[a]
	case l.state == held && now < l.endsAt:
		// A yes that is read after the end comes too late: the end may have been acted upon.
		l.renewed(now)
	}
	return true
}

func (l *lease) renewed(now int64) {
	l.failures = 0
	carried := terms{ttl: l.sentTTL}
	l.endsAt = carried.endsAt(l.sentAt)
	l.dueAt = l.sentAt + furthest
	if !l.terms.noRenew {
		l.dueAt = max(carried.renewAt(l.sentAt), l.terms.renewExtendedAt(l.endsAt))
	}
	if l.extension != 0 && l.extension != l.sentTTL {
		l.dueAt = now // it was asked for while a renewal was in flight
	} else {
		l.extension = 0
	}
}
