package lockkeeper

import (
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"
)

// What went wrong, for [errors.Is]. The errors themselves say more.
var (
	// ErrBusy: another holds the lock, or somebody is queued before us, and the wait, if any, is over.
	ErrBusy = errors.New("lockkeeper: the lock is busy")
	// ErrLost: the lock is not held any longer. The error is a [*LostError], which says why.
	ErrLost = errors.New("lockkeeper: the lock is lost")
	// ErrReleased: the lock was given up by its holder.
	ErrReleased = errors.New("lockkeeper: the lock was released")
	// ErrInvalid: the caller asked for something that makes no sense. Nothing was sent.
	ErrInvalid = errors.New("lockkeeper: invalid")
	// ErrUnreachable: nobody answered in time, so it is not known what the server did. What may have been granted is
	// released in the background, and ends by itself after one ttl.
	ErrUnreachable = errors.New("lockkeeper: the server cannot be reached")
	// ErrRefused: the server answered with an error, whose words follow.
	ErrRefused = errors.New("lockkeeper: the server refuses")
	// ErrModuleMissing: the server has no Lockkeeper. It is also ErrRefused.
	ErrModuleMissing = fmt.Errorf("%w: start it with --loadmodule .../liblockkeeper.so, or MODULE LOAD it", ErrRefused)
)

// LostError says why a lock is not held any longer.
type LostError struct {
	Key string
	Why Why
}

var whys = map[Why]string{
	Taken:   "another owner holds it",
	Gone:    "it is gone from the server",
	Expired: "it could not be renewed before it ended",
	MaxHold: "it was held as long as it may be",
}

func (e *LostError) Error() string { return fmt.Sprintf("%v: %q: %s", ErrLost, e.Key, whys[e.Why]) }

// Is makes a LostError an ErrLost, and equal to another that says the same.
func (e *LostError) Is(target error) bool {
	other, ok := target.(*LostError)
	return target == ErrLost || ok && *e == *other
}

// failure is a question that got no answer, with what is known about the request.
type failure struct {
	error
	unsent   bool // it did not leave
	silent   bool // nobody answered in time, so RELEASE was sent behind it: its owner is of no use any more
	noServer bool // the server was never there, so most likely the address is wrong
}

func (f *failure) Unwrap() error { return f.error }

func unreachable(server string, cause any) error {
	return fmt.Errorf("%w: %s: %v", ErrUnreachable, server, cause)
}

// refusal gives the server's words if err is an error reply.
func refusal(err error) (line string, ok bool) {
	if err == nil || errors.Is(err, redis.Nil) {
		return "", false
	}
	var reply redis.Error
	if !errors.As(err, &reply) {
		return "", false
	}
	return reply.Error(), true
}

// has tells whether the first word of an error reply is one of these.
func has(err error, codes string) bool {
	line, ok := refusal(err)
	code, _, _ := strings.Cut(line, " ")
	return ok && strings.Contains(" "+codes+" ", " "+code+" ")
}

const (
	// A server that says this is not the master, or not yet: where it is, another may be soon.
	elsewhere = "READONLY LOADING MASTERDOWN"
	// The server may answer otherwise in a moment.
	passing = elsewhere + " ASK BUSY CLUSTERDOWN MOVED NOREPLICAS QUEUEFULL TRYAGAIN UNBLOCKED"
)

func isPassing(err error) bool { return errors.Is(err, ErrUnreachable) || has(err, passing) }

// refusedBy is an error reply as it is told to the caller.
func refusedBy(server string, err error) error {
	if line, _ := refusal(err); strings.Contains(line, "unknown command") {
		return fmt.Errorf("%s: %w (%w)", server, ErrModuleMissing, err)
	}
	return fmt.Errorf("%w: %w", ErrRefused, err)
}
