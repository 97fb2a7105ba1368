// Porcupine judges the histories that tests/chaos records a second time: are they what a lock may do, seen as one
// sequential object? The first judge, tests/chaos/checker.rs, has rules for what must not happen; this one has a model of
// the lock, and looks for an order of all operations that the model allows. Both must say the same.
//
//	porcupine FOLDER
//
// It fails if the judges differ, or if one of them finds fault with a history in which none was planted. What is no history
// of a lock it draws, in FILE-KEY.html. Where it finds no order in time it says Unknown: most likely there is none.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// patience is for one key of one history: most need milliseconds.
const patience = time.Minute

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: porcupine FOLDER")
		os.Exit(2)
	}
	paths, _ := filepath.Glob(filepath.Join(os.Args[1], "*.jsonl"))
	if len(paths) == 0 {
		fmt.Fprintln(os.Stderr, "no history in", os.Args[1])
		os.Exit(2)
	}
	failed := false
	for _, path := range paths {
		h, err := read(path)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		verdict := judge(h, strings.TrimSuffix(path, ".jsonl"))
		theirs := porcupine.Ok
		if slices.ContainsFunc(h.found, func(kind string) bool { return slices.Contains(judged, kind) }) {
			theirs = porcupine.Illegal
		}
		isClean := verdict == porcupine.Ok && len(h.found) == 0
		differ := h.found != nil && verdict != theirs && (verdict != porcupine.Unknown || theirs == porcupine.Ok)
		remark := ""
		if differ || !isClean && !strings.HasPrefix(h.run, "planted") {
			failed, remark = true, "  <- wrong"
		}
		fmt.Printf("%-60s %7d events  %-8s  first judge: %v%s\n", filepath.Base(path), len(h.events), verdict, h.found, remark)
	}
	if failed {
		os.Exit(1)
	}
}

// judge tells whether every key behaves as a lock. What does not is drawn, in a file for each key that begins with name.
func judge(h *history, name string) porcupine.CheckResult {
	verdict := porcupine.Ok
	m := modelOf(h)
	for key, operations := range operations(h) {
		result, info := porcupine.CheckOperationsVerbose(m, operations, patience)
		if result == porcupine.Ok {
			continue
		}
		verdict = result
		if name == "" {
			continue
		}
		if err := porcupine.VisualizePath(m, info, fmt.Sprintf("%s-%d.html", name, key)); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
	return verdict
}
