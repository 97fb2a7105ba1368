package lockkeeper

import (
	"bufio"
	"encoding/json"
	"os"
	"reflect"
	"testing"
)

const start = 1000 * second

func mustBe[T any](t *testing.T, found, expected T) {
	t.Helper()
	if !reflect.DeepEqual(found, expected) {
		t.Fatalf("found %v, expected %v", found, expected)
	}
}

func TestALeaseIsRenewedAtAThirdOfTheTTLCountedFromTheSend(t *testing.T) {
	l := granted(terms{ttl: 6 * second}, start, start+1500*millisecond)
	mustBe(t, l.next(start+1999*millisecond), action{verb: sleep, at: start + 2*second})
	sentAt := int64(start + 2*second)
	mustBe(t, l.next(sentAt), action{verb: renew, ttl: 6 * second, at: sentAt + second})
	l.answered(sentAt, yes, sentAt+900*millisecond)
	mustBe(t, l.endsAt, sentAt+5938*millisecond)
	mustBe(t, l.next(sentAt+900*millisecond), action{verb: sleep, at: sentAt + 2*second})
}

func TestAFailedRenewalIsTriedAgainUntilTheLeaseEnds(t *testing.T) {
	l, now, attempts := granted(terms{ttl: 6 * second}, start, start), int64(start), []int64{}
	for {
		next := l.next(now)
		if next.verb == sleep {
			now = next.at
			continue
		}
		if next.verb != renew {
			mustBe(t, next, action{verb: lose, why: Expired})
			break
		}
		attempts = append(attempts, (now-start)/millisecond)
		l.answered(now, failed, now)
	}
	mustBe(t, attempts, []int64{2000, 2100, 2300, 2700, 3200, 3700, 4200, 4700, 5200, 5700})
	mustBe(t, now, start+5938*millisecond)
}

func TestALeaseWithoutRenewalJustEnds(t *testing.T) {
	l := granted(terms{ttl: 6 * second, noRenew: true}, start, start)
	end := int64(start + 5938*millisecond)
	mustBe(t, l.next(start), action{verb: sleep, at: end})
	l.renewNow(start)
	mustBe(t, l.next(start).verb, renew)
	l.answered(start, yes, start)
	mustBe(t, l.next(start), action{verb: sleep, at: end})
}

// The lease does what the Rust lease did when it was recorded, to the microsecond.
func TestEveryRecordingIsReplayed(t *testing.T) {
	file, err := os.Open("../conformance/vectors/lease.jsonl")
	if os.IsNotExist(err) {
		t.Skip("NOT TESTED: the recorded leases are not here: ../conformance/vectors/lease.jsonl")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines, count := bufio.NewScanner(file), 0
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		count++
		var path recording
		if err := json.Unmarshal(lines.Bytes(), &path); err != nil {
			t.Fatalf("recording %d: %v", count, err)
		}
		path.replay(t, count)
	}
	if lines.Err() != nil || count < 100 {
		t.Fatal(count, lines.Err())
	}
}

type recording struct {
	Begins  string
	TTL     int64 `json:"ttl_us"`
	MaxHold int64 `json:"max_hold_us"`
	SentAt  int64 `json:"sent_at"`
	Now     int64
	Steps   []step
}

type step struct {
	At       int64
	Event    []any
	Awaited  bool
	Action   []any
	EndsAt   int64 `json:"ends_at"`
	Lost     Why
	Failures int
	GivenUp  bool `json:"given_up"`
}

func (path recording) replay(t *testing.T, number int) {
	t.Helper()
	l := granted(terms{ttl: path.TTL, maxHold: path.MaxHold}, path.SentAt, path.Now)
	if path.Begins == "in_doubt" {
		l = inDoubt(l.terms, path.Now)
	}
	answers := map[any]answer{"yes": yes, "taken": taken, "gone": gone, "failed": failed}
	for _, step := range path.Steps {
		// The numbers of JSON are exact up to 2^53.
		argument := func() int64 { return int64(step.Event[1].(float64)) }
		awaited := false
		switch step.Event[0] {
		case "answered":
			awaited = l.answered(argument(), answers[step.Event[2]], step.At)
		case "give_up":
			l.giveUp(argument(), step.At)
		case "renew_now":
			l.renewNow(step.At)
		case "extend":
			l.extend(argument(), step.At)
		}
		next := l.next(step.At)
		names := map[verb][]any{
			sleep: {"sleep", float64(next.at)}, idle: {"idle"}, end: {"end"}, lose: {"lose", string(next.why)},
			renew: {"renew", float64(next.ttl), float64(next.at)}, release: {"release", float64(next.at)},
		}
		found := step
		found.Awaited, found.Action, found.EndsAt = awaited, names[next.verb], l.endsAt
		found.Lost, found.Failures, found.GivenUp = l.lost, l.failures, l.isGivenUp()
		if !reflect.DeepEqual(found, step) {
			t.Fatalf("recording %d: found %+v, expected %+v", number, found, step)
		}
	}
}
