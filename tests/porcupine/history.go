package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
)

// history is a recorded run of tests/chaos. All times are microseconds since it began.
type history struct {
	run    string
	ttl    int64
	events []event
	faults []fault
	// found is what the first judge, tests/chaos/checker.rs, says: the kinds of its violations; nil if it was not asked.
	found []string
}

// event is one question, and what became of it.
type event struct {
	Tenure   int64
	By       string // raw, or the name of an agent
	Key      int
	Limit    int    // how many its owner lets hold the lock at once, itself among them
	Did      string // acquire, renew, check, release, write
	Wait     int64
	Safe     bool // the grant counts only once a replica has it
	Order    int64
	Shown    int64 // the fence of a write
	Asked    int64
	Answered *int64 // nil: nobody has answered
	Answer   string // held, released, not, accepted, refused, failed
	Fence    int64
	Until    int64 // it is held until then at least
}

// fault is something done to the servers or to an owner, from its beginning until all is well again.
type fault struct {
	Fault    string
	From, To int64
	Loses    bool // what was answered just before may be forgotten
	Skew     int64
}

// line is any line of the file: which one, its fields tell.
type line struct {
	Run        string
	TTL        int64
	Violations []string
	event
	fault
}

func read(path string) (*history, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	h, lines := &history{}, bufio.NewScanner(file)
	for number := 1; lines.Scan(); number++ {
		var l line
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, number, err)
		}
		switch {
		case l.Run != "":
			h.run, h.ttl = l.Run, l.TTL
		case l.Did != "":
			h.events = append(h.events, l.event)
		case l.Fault != "":
			h.faults = append(h.faults, l.fault)
		case l.Violations != nil:
			h.found = l.Violations
		default:
			return nil, fmt.Errorf("%s:%d: neither a run, an event, a fault nor a verdict", path, number)
		}
	}
	if lines.Err() == nil && h.ttl == 0 {
		return nil, fmt.Errorf("%s: the first line must name the run and its ttl", path)
	}
	return h, lines.Err()
}
