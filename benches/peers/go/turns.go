package main

import (
	"math/rand/v2"
	"sync"
	"time"
)

// record is what one client did: when it asked, was granted and began to release, and since when it waits.
type record struct {
	mu           sync.Mutex
	Turns        [][3]float64 `json:"turns"`
	WaitingSince *float64     `json:"waiting_since"`
}

// turns lets so many clients ask for the lock, hold it, pause for a random part of pause, and ask again.
func turns(newLocker func() locker, clients int, hold, pause, length float64) []*record {
	records, start := make([]*record, clients), time.Now()
	now := func() float64 { return time.Since(start).Seconds() }
	for i := range records {
		records[i] = &record{Turns: [][3]float64{}}
		go func() {
			for lock := newLocker(); ; sleep(rand.Float64() * pause) {
				records[i].turn(lock, hold, length, now)
			}
		}()
	}
	sleep(length)
	for _, each := range records {
		each.mu.Lock() // for good: what a client does from here on is not counted
	}
	return records
}

func (r *record) turn(lock locker, hold, length float64, now func() float64) {
	asked := now()
	r.note(func() { r.WaitingSince = &asked })
	must(lock.acquire())
	granted := now()
	r.note(func() { r.WaitingSince = nil })
	sleep(hold)
	releasing := now()
	must(lock.release())
	r.note(func() {
		if releasing < length {
			r.Turns = append(r.Turns, [3]float64{asked, granted, releasing})
		}
	})
}

func (r *record) note(what func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	what()
}

func sleep(seconds float64) { time.Sleep(time.Duration(seconds * float64(time.Second))) }
