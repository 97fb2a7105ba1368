package lockkeeper

import (
	"fmt"
	"log/slog"
	"math"
	"os"
	"time"
)

// maxOwner is the longest owner in bytes, so that the whole value, <fence>:<owner>, fits the 512 of an argument.
const maxOwner = 495

// maxLabel leaves room for a colon and a UUID.
const maxLabel = maxOwner - 37

// Of how many holders a lock may have: exclusive is one, shared the most that a key can have.
const (
	exclusive = 1
	shared    = 1000
)

// forever is a wait without bound.
const forever = math.MaxInt64

type settings struct {
	terms       terms
	wait        int64
	limit       int    // how many may hold it at once
	limitedBy   string // the option that said so, of those that are being read
	label       string
	minReplicas int
	logger      *slog.Logger
	invalid     error
}

// Option changes one lock, or, given to [New], all locks of a client.
type Option func(*settings)

// WithTTL sets how long the lock outlives a holder that is gone, 100 ms or more; 30 s by default. A living holder
// renews every third of it, and has two thirds of it to get through to a server that does not answer.
func WithTTL(ttl time.Duration) Option {
	return func(s *settings) {
		s.terms.ttl = ttl.Milliseconds() * millisecond
		if s.terms.ttl < minTTL {
			s.invalid = fmt.Errorf("%w: the ttl must be at least 100 ms, got %v", ErrInvalid, ttl)
		}
	}
}

// WithWait bounds how long [Client.Acquire] waits in the queue. By default it waits until its context ends.
func WithWait(wait time.Duration) Option {
	return func(s *settings) { s.wait = max(0, wait.Microseconds()) }
}

// WithLimit makes the lock one of n places, 1 to 1,000: it is granted as long as no holder, this one included, has more
// company than it allows. Nothing is set up: the limit travels with the request, and the strictest holder counts.
//
// No fence protects among the holders of a limit: one whose lease ran out looks like its living companions.
func WithLimit(n int) Option {
	return func(s *settings) {
		s.limitTo(n, "WithLimit")
		if n < exclusive || n > shared {
			s.invalid = fmt.Errorf("%w: the limit must be from 1 to 1000, got %d", ErrInvalid, n)
		}
	}
}

// Shared makes the lock that of a reader: it is held beside all other readers, and not beside a writer, who asks without
// this option. A reader who comes after a waiting writer waits, so neither starves.
func Shared() Option {
	return func(s *settings) { s.limitTo(shared, "Shared") }
}

func (s *settings) limitTo(n int, option string) {
	if s.limitedBy != "" && s.limitedBy != option {
		s.invalid = fmt.Errorf("%w: WithLimit and Shared are both given, give one", ErrInvalid)
	}
	s.limit, s.limitedBy = n, option
}

// WithLabel sets the first part of the owner, `host:pid` by default, by which LOCK.INFO shows who it is. A UUID
// follows, new for every acquire.
func WithLabel(label string) Option {
	return func(s *settings) {
		s.label = label
		if len(label) > maxLabel {
			s.invalid = fmt.Errorf("%w: the label must not be longer than %d bytes, got %d", ErrInvalid, maxLabel, len(label))
		}
	}
}

// WithMaxHold ends renewal so long after the grant: then the lock counts as lost, with [MaxHold]. By default it is
// renewed for ever.
func WithMaxHold(hold time.Duration) Option {
	return func(s *settings) {
		s.terms.maxHold = hold.Microseconds()
		if s.terms.maxHold <= 0 {
			s.invalid = fmt.Errorf("%w: the longest hold must be more than 0, got %v", ErrInvalid, hold)
		}
	}
}

// WithMinReplicas counts only what so many replicas acknowledged, so that a failover to one of them keeps the lock.
// Needs the right to call WAIT.
func WithMinReplicas(count int) Option {
	return func(s *settings) {
		s.minReplicas = count
		if count < 0 {
			s.invalid = fmt.Errorf("%w: the number of replicas must not be negative, got %d", ErrInvalid, count)
		}
	}
}

// WithoutRenewal lets the lock end after one ttl, unless [Lock.Renew] is called.
func WithoutRenewal() Option { return func(s *settings) { s.terms.noRenew = true } }

// WithLogger sets who is told of grants and releases (debug), failed renewals (warning) and losses (error);
// [slog.Default] by default. It counts for the whole client, so only [New] heeds it.
func WithLogger(logger *slog.Logger) Option { return func(s *settings) { s.logger = logger } }

func defaults() settings {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	label := fmt.Sprintf("%.400s:%d", host, os.Getpid())
	return settings{terms: terms{ttl: 30 * second}, wait: forever, limit: exclusive, label: label, logger: slog.Default()}
}

func (s settings) with(options []Option) settings {
	s.limitedBy = "" // one lock may be another than those of its client
	for _, option := range options {
		option(&s)
	}
	return s
}
