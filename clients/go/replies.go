package lockkeeper

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

// The commands as they are sent, and their replies as they are read: the one place that knows the protocol.

type command []any

// inMs is rounded down, so that we never count on more than the server was asked for; it takes no 0.
func inMs(micros int64) int64 { return max(1, micros/millisecond) }

// acquireCommand says nothing of a limit of one, so that an older module understands it.
func acquireCommand(key, owner string, ttl int64, limit int) command {
	asked := command{"LOCK.ACQUIRE", key, owner, inMs(ttl)}
	switch limit {
	case exclusive:
		return asked
	case shared:
		return append(asked, "SHARED")
	}
	return append(asked, "LIMIT", limit)
}

func waitCommand(key, owner string, ttl, wait int64, limit int) command {
	return append(acquireCommand(key, owner, ttl, limit), "WAIT", inMs(wait))
}

func renewCommand(key, owner string, ttl int64) command {
	return command{"LOCK.RENEW", key, owner, inMs(ttl)}
}

func releaseCommand(key, owner string) command { return command{"LOCK.RELEASE", key, owner} }

func infoCommand(key string) command { return command{"LOCK.INFO", key} }

// replicasCommand asks how many replicas have acknowledged what this connection wrote, in time for the answer to
// arrive.
func replicasCommand(count int, within int64) command {
	return command{"WAIT", count, inMs(within / 5 * 4)}
}

func unexpected(reply any) error {
	return fmt.Errorf("%w: what answers is not Lockkeeper, it said %.100q", ErrUnreachable, fmt.Sprint(reply))
}

// readFence gives what ACQUIRE answered: the fence, or 0 when the lock is busy.
func readFence(reply any, err error) (int64, error) {
	if errors.Is(err, redis.Nil) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if fence, ok := reply.(int64); ok && fence > 0 {
		return fence, nil
	}
	return 0, unexpected(reply)
}

// readAnswer gives what RENEW or RELEASE answered: only exactly 1 is a yes.
func readAnswer(reply any, err error) (answer, error) {
	if errors.Is(err, redis.Nil) {
		return gone, nil
	}
	if err != nil {
		return failed, err
	}
	switch reply {
	case int64(1):
		return yes, nil
	case int64(0):
		return taken, nil
	}
	return failed, unexpected(reply)
}

// refusedHere is an error reply that we make ourselves.
type refusedHere string

func (r refusedHere) Error() string { return string(r) }
func (refusedHere) RedisError()     {}

// readReplicas gives what is wrong if too few replicas acknowledged.
func readReplicas(reply *redis.Cmd, wanted int) error {
	acknowledged, ok := reply.Val().(int64)
	if err := reply.Err(); err != nil {
		return err
	}
	if !ok || acknowledged < int64(wanted) {
		return refusedHere(fmt.Sprintf("NOREPLICAS %d of %d replicas acknowledged", acknowledged, wanted))
	}
	return nil
}

// Info tells who holds a lock and who waits for it, by the server's clock.
type Info struct {
	// Owner holds it alone; empty if nobody does and somebody waits, or if others may hold it as well: see Holders.
	Owner string
	// Fence of Owner's grant; 0 for a lock that was taken by hand.
	Fence int64
	// Held is for how long Owner has held it; 0 for a lock that was taken by hand.
	Held time.Duration
	// TTL is when it ends, with several holders the last of them, unless it is renewed; negative if it never does, or nobody
	// holds it.
	TTL time.Duration
	// Limit is how many may hold it, as the strictest of its holders says; 0 if nobody holds it.
	Limit int64
	// Holding is how many hold it.
	Holding int64
	// Holders are the first 100 of them, in order of their grants.
	Holders []Holder
	// Waiters is how many wait.
	Waiters int64
	// Queue are the first 100 of those who wait, in order.
	Queue []Waiter
}

// Holder is one of those who hold a lock, as [Info] tells of Owner; Limit is how many may hold it beside each other as far
// as this one is concerned.
type Holder struct {
	Owner string
	Fence int64
	Held  time.Duration
	TTL   time.Duration
	Limit int64
}

// Waiter is somebody who waits for a lock, alone or with others up to its limit.
type Waiter struct {
	Owner  string
	Waited time.Duration
	Limit  int64
}

// readInfo gives nil if nobody holds the lock and nobody waits. Unknown fields are skipped: a later module may tell
// more.
func readInfo(reply any, err error) (*Info, error) {
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	fields := readMap(reply)
	waiters, ok := fields["waiters"].(int64)
	queue, isList := fields["queue"].([]any)
	if !ok || !isList {
		return nil, unexpected(reply)
	}
	info := &Info{Waiters: waiters, Held: readMs(fields["held-ms"]), TTL: readMs(fields["ttl-ms"])}
	info.Owner, _ = fields["owner"].(string)
	info.Fence, _ = fields["fence"].(int64)
	for _, each := range queue {
		waiter := readMap(each)
		owner, _ := waiter["owner"].(string)
		info.Queue = append(info.Queue, Waiter{owner, readMs(waiter["waited-ms"]), readLimit(waiter)})
	}
	if holders, several := fields["holders"].([]any); several {
		info.Limit, _ = fields["limit"].(int64)
		info.Holding, _ = fields["holding"].(int64)
		for _, each := range holders {
			info.Holders = append(info.Holders, readHolder(readMap(each)))
		}
	} else if _, held := fields["owner"].(string); held {
		info.Limit, info.Holding, info.Holders = exclusive, 1, []Holder{readHolder(fields)}
	}
	return info, nil
}

func readHolder(fields map[any]any) Holder {
	owner, _ := fields["owner"].(string)
	fence, _ := fields["fence"].(int64)
	return Holder{owner, fence, readMs(fields["held-ms"]), readMs(fields["ttl-ms"]), readLimit(fields)}
}

// readLimit: what is exclusive says nothing of a limit.
func readLimit(fields map[any]any) int64 {
	if limit, ok := fields["limit"].(int64); ok {
		return limit
	}
	return exclusive
}

func (i *Info) isHeldBy(owner string) bool {
	return i != nil && slices.ContainsFunc(i.Holders, func(holder Holder) bool { return holder.Owner == owner })
}

func (i *Info) knows(owner string) bool {
	if i == nil {
		return false
	}
	if i.isHeldBy(owner) {
		return true
	}
	for _, waiter := range i.Queue {
		if waiter.Owner == owner {
			return true
		}
	}
	return i.Holding > int64(len(i.Holders)) || i.Waiters > int64(len(i.Queue))
}

// readMap reads a map in RESP3, a flat list in RESP2.
func readMap(reply any) map[any]any {
	if fields, ok := reply.(map[any]any); ok {
		return fields
	}
	fields := map[any]any{}
	list, _ := reply.([]any)
	for i := 0; i+1 < len(list); i += 2 {
		if name, ok := list[i].(string); ok {
			fields[name] = list[i+1]
		}
	}
	return fields
}

func readMs(value any) time.Duration {
	ms, _ := value.(int64)
	return time.Duration(ms) * time.Millisecond
}
