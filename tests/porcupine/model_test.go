package main

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/anishathalye/porcupine"
)

const (
	ttl    = 1_000_000
	second = 1_000_000
)

func asked(tenure int64, did string, from, to int64, answer string) event {
	return event{Tenure: tenure, By: "raw", Limit: 1, Did: did, Asked: from, Answered: &to, Answer: answer}
}

// got is a grant at once, to one who does not wait.
func got(tenure, at, fence int64) event {
	e := asked(tenure, "acquire", at, at+10, "held")
	e.Fence, e.Until = fence, at+ttl
	return e
}

func renewed(tenure, at, fence int64) event {
	e := asked(tenure, "renew", at, at+10, "held")
	e.Fence, e.Until = fence, at+ttl
	return e
}

func released(tenure, at int64) event { return asked(tenure, "release", at, at+10, "released") }

func wrote(tenure, at, order, fence int64, answer string) event {
	e := asked(tenure, "write", at, at, answer)
	e.Order, e.Shown = order, fence
	return e
}

// limit is the event of an owner that lets so many hold the lock.
func limit(n int, e event) event {
	e.Limit = n
	return e
}

// helped is the event of an owner that works through a helper.
func helped(e event) event {
	e.By = "go"
	return e
}

// waited is an acquire that was answered later.
func waited(e event, from int64) event {
	e.Asked, e.Wait = from, 10*second
	return e
}

func TestTheModelIsALock(t *testing.T) {
	crash := fault{Fault: "crash", From: 100, To: 200}
	failover := fault{Fault: "failover", From: 100, To: 200, Loses: true}
	skew := fault{Fault: "failover", From: 100, To: 200, Skew: second / 2}
	onReplica := got(1, 0, 5)
	onReplica.Safe = true
	for name, each := range map[string]struct {
		legal  bool
		events []event
		faults []fault
	}{
		"one after the other": {true, []event{got(1, 0, 5), released(1, 20), got(2, 40, 6)}, nil},
		"two owners":          {false, []event{got(1, 0, 5), got(2, 40, 6)}, nil},
		"two owners, the first was only released": {true, []event{got(1, 0, 5), asked(1, "release", 20, 90, "released"), got(2, 40, 6)}, nil},
		"a lease that has ended":                  {true, []event{got(1, 0, 5), got(2, ttl, 6)}, nil},
		"a lease that was renewed":                {false, []event{got(1, 0, 5), renewed(1, ttl/2, 5), got(2, ttl+20, 6)}, nil},
		"renewed after another was granted":       {false, []event{got(1, 0, 5), got(2, ttl, 6), renewed(1, ttl+40, 5)}, nil},
		"ended early":                             {false, []event{got(1, 0, 5), asked(1, "renew", 500, 510, "not")}, nil},
		"ended in time":                           {true, []event{got(1, 0, 5), asked(1, "renew", ttl, ttl+10, "not")}, nil},
		"believed to have ended, and released":    {true, []event{got(1, 0, 5), asked(1, "check", ttl, ttl, "not"), released(1, ttl+10)}, nil},
		"believed to have ended early":            {false, []event{got(1, 0, 5), asked(1, "check", 500, 500, "not")}, nil},
		"ended early in a crash":                  {false, []event{got(1, 0, 5), asked(1, "renew", 500, 510, "not")}, []fault{crash}},
		"forgotten in a failover":                 {true, []event{got(1, 0, 5), asked(1, "renew", 500, 510, "not")}, []fault{failover}},
		"forgotten, although a replica had it":    {false, []event{onReplica, asked(1, "renew", 500, 510, "not")}, []fault{failover}},
		"shortened by a clock":                    {true, []event{got(1, 0, 5), got(2, ttl-second/3, 6)}, []fault{skew}},
		"shortened by more than the clock":        {false, []event{got(1, 0, 5), got(2, ttl-second*2/3, 6)}, []fault{skew}},
		"released by a stranger":                  {false, []event{got(1, 0, 5), got(2, ttl, 6), released(1, ttl+40)}, nil},
		"the same fence":                          {false, []event{got(1, 0, 5), released(1, 20), got(2, 40, 5)}, nil},
		"the same fence after a failover":         {false, []event{got(1, 0, 5), got(2, 500, 5)}, []fault{failover}},
		"an older fence":                          {false, []event{got(1, 0, 5), released(1, 20), got(2, 40, 4)}, nil},
		"asked again":                             {true, []event{asked(1, "acquire", 0, 10, "failed"), got(1, 20, 5), released(1, 40)}, nil},
		"granted unheard":                         {true, []event{asked(1, "acquire", 0, 10, "failed"), released(1, 40), got(2, 60, 5)}, nil},
		"granted unheard, while another held it":  {false, []event{got(2, 0, 5), asked(1, "acquire", 20, 30, "failed"), released(1, 40)}, nil},
		"a release that nobody answered":          {true, []event{got(1, 0, 5), asked(1, "release", 20, 30, "failed"), got(2, 40, 6)}, nil},
		"the storage is shown an older fence": {false, []event{got(1, 0, 5), got(2, ttl, 6), wrote(2, ttl+20, 1, 6, "accepted"),
			wrote(1, ttl+30, 2, 5, "accepted")}, nil},
		"the storage refuses an older fence": {true, []event{got(1, 0, 5), got(2, ttl, 6), wrote(2, ttl+20, 1, 6, "accepted"),
			wrote(1, ttl+30, 2, 5, "refused")}, nil},
		"the storage refuses the owner": {false, []event{got(1, 0, 5), wrote(1, 20, 1, 5, "refused")}, nil},
		"who waits is passed over": {false, []event{got(1, 0, 5), released(1, 2*second), got(3, 2*second+20, 6),
			released(3, 2*second+50), waited(got(2, 2*second+60, 7), 100)}, nil},
		"who waits through a helper may be on its way": {true, []event{got(1, 0, 5), released(1, 2*second), got(3, 2*second+20, 6),
			released(3, 2*second+50), helped(waited(got(2, 2*second+60, 7), 100))}, nil},
		"who comes a little later is served before": {true, []event{got(1, 0, 5), released(1, 20), waited(got(3, 40, 6), 11),
			released(3, 60), waited(got(2, 70, 7), 10)}, nil},
		"as many as all allow": {true, []event{limit(2, got(1, 0, 5)), limit(3, got(2, 20, 6)), limit(2, renewed(1, ttl/2, 5)),
			limit(3, released(2, ttl/2+20))}, nil},
		"one more than the first allows": {false, []event{limit(2, got(1, 0, 5)), limit(3, got(2, 20, 6)), limit(3, got(3, 40, 7))}, nil},
		"one more than the last allows":  {false, []event{limit(3, got(1, 0, 5)), limit(3, got(2, 20, 6)), limit(2, got(3, 40, 7))}, nil},
		"one whose lease has ended makes room": {true, []event{limit(2, got(1, 0, 5)), limit(2, got(2, ttl/2, 6)),
			limit(2, got(3, ttl, 7)), limit(2, renewed(2, ttl+20, 6))}, nil},
		"one whose lease has ended makes room for one": {false, []event{limit(2, got(1, 0, 5)), limit(2, got(2, ttl/2, 6)),
			limit(2, got(3, ttl, 7)), limit(2, got(4, ttl+20, 8))}, nil},
		"a writer beside a reader": {false, []event{limit(9, got(1, 0, 5)), got(2, 20, 6)}, nil},
		"one was forgotten, and not the other": {false, []event{limit(2, onReplica), limit(2, got(2, 20, 6)), got(3, 500, 7)},
			[]fault{failover}},
		"beside one who was not forgotten": {true, []event{limit(2, onReplica), limit(2, got(2, 20, 6)), limit(2, got(3, 500, 7))},
			[]fault{failover}},
		"granted unheard before a companion, asked again": {true, []event{limit(2, asked(1, "acquire", 0, 10, "failed")),
			limit(2, got(2, 20, 6)), limit(2, got(1, 40, 5))}, nil},
		"an older fence than a companion's": {false, []event{limit(2, got(1, 0, 5)), limit(2, got(2, 20, 4))}, nil},
		"the storage is shown a companion's older fence": {true, []event{limit(2, got(1, 0, 5)), limit(2, got(2, 20, 6)),
			limit(2, wrote(2, 40, 1, 6, "accepted")), limit(2, wrote(1, 50, 2, 5, "accepted"))}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			h := &history{run: name, ttl: ttl, events: each.events, faults: each.faults}
			if legal := judge(h, "") == porcupine.Ok; legal != each.legal {
				t.Fatalf("legal: %v", legal)
			}
		})
	}
}

func TestAHistoryIsReadAsItIsRecorded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "one.jsonl")
	text := `{"run": "quiet", "seed": 1, "ttl": 1000000}
{"tenure": 0, "by": "go", "key": 2, "limit": 1000, "did": "acquire", "wait": 3000000, "safe": true, "asked": 1, "answered": 2, "answer": "held", "fence": 1795986866264000, "until": 1000001}
{"tenure": 0, "by": "go", "key": 2, "did": "release", "asked": 3, "answered": null, "answer": null}
{"fault": "kill -9 and restart", "from": 4, "to": 5, "loses": true, "skew": 6}
{"violations": ["SameFence"]}
`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := read(path)
	if err != nil {
		t.Fatal(err)
	}
	two := int64(2)
	first := event{By: "go", Key: 2, Limit: 1000, Did: "acquire", Wait: 3000000, Safe: true, Asked: 1, Answered: &two, Answer: "held", Fence: 1795986866264000, Until: 1000001}
	last := event{By: "go", Key: 2, Did: "release", Asked: 3}
	expected := history{"quiet", ttl, []event{first, last}, []fault{{"kill -9 and restart", 4, 5, true, 6}}, []string{"SameFence"}}
	if !reflect.DeepEqual(*h, expected) {
		t.Fatalf("found %+v, expected %+v", *h, expected)
	}
	if err := os.WriteFile(path, []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := read(path); err == nil {
		t.Fatal("it was read")
	}
}
