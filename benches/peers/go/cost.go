package main

import (
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// cost is what was spent so far, in microseconds.
type cost struct{ wall, client, server float64 }

func costs(rdb *redis.Client) (c cost) {
	info := rdb.InfoMap(background, "cpu").Val()["CPU"]
	c.server = 1e6 * (number(info["used_cpu_user_main_thread"]) + number(info["used_cpu_sys_main_thread"]))
	var usage syscall.Rusage
	must(syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	c.client = float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e3
	c.wall = float64(time.Now().UnixMicro())
	return c
}

func (c cost) since(before cost) cost {
	return cost{c.wall - before.wall, c.client - before.client, c.server - before.server}
}
