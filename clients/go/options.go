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

// forever is a wait without bound.
const forever = math.MaxInt64

type settings struct {
	terms       terms
	wait        int64
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
	return settings{terms: terms{ttl: 30 * second}, wait: forever, label: label, logger: slog.Default()}
}

func (s settings) with(options []Option) settings {
	for _, option := range options {
		option(&s)
	}
	return s
}
