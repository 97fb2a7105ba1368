package lockkeeper

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// What the README shows is part of an example, all of which are run.
func TestTheREADMEIsRun(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	mustErr(t, err, nil)
	files, err := filepath.Glob("*example_test.go")
	mustErr(t, err, nil)
	var examples []byte
	for _, file := range files {
		text, err := os.ReadFile(file)
		mustErr(t, err, nil)
		examples = append(examples, text...)
	}
	unindented := func(text string) string {
		text = strings.ReplaceAll(text, `"127.0.0.1:6379"`, "lockkeeper.ExampleAddr")
		return regexp.MustCompile(`(?m)^\s+`).ReplaceAllString(strings.TrimSpace(text), "")
	}
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(readme), -1)
	if len(blocks) < 5 {
		t.Fatalf("only %d blocks", len(blocks))
	}
	for _, block := range blocks {
		if !strings.Contains(unindented(string(examples)), unindented(block[1])) {
			t.Errorf("no example has this:\n%s", block[1])
		}
	}
}
