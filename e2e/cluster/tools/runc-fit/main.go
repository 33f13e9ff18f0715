// runc-fit removes from a container's OCI spec what root cannot grant on this machine, and then runs the real runc.
//
// In some virtual machines and containers root lacks CAP_SYS_RESOURCE; `docker run --privileged`, and so kind, fails
// there with "unable to apply caps". Such a root may also not raise a hard rlimit nor lower an oom_score_adj. Where
// the capability exists, nothing is changed.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

const capSysResource = 24

func main() {
	if file, isProcess := specFile(os.Args[1:]); file != "" && lacksSysResource() {
		if err := fitFile(file, isProcess); err != nil {
			fail(err)
		}
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		fail(err)
	}
	fail(syscall.Exec(runc, append([]string{"runc"}, os.Args[1:]...), os.Environ()))
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "runc-fit:", err)
	os.Exit(1)
}

// specFile finds in runc's arguments the file that describes the process to start: the bundle's config.json for
// `create` and `run`, the process file for `exec` (a process alone, not a whole spec).
func specFile(args []string) (file string, isProcess bool) {
	command, bundle, process := "", ".", ""
	for i, arg := range args {
		if command == "" && (arg == "create" || arg == "run" || arg == "exec") {
			command = arg
		}
		name, value, joined := strings.Cut(arg, "=")
		if !joined && i+1 < len(args) {
			value = args[i+1]
		}
		switch name {
		case "--bundle", "-b":
			bundle = value
		case "--process", "-p":
			process = value
		}
	}
	switch command {
	case "create", "run":
		return filepath.Join(bundle, "config.json"), false
	case "exec":
		return process, true
	}
	return "", false
}

// lacksSysResource reports whether the bounding set, which no child process can exceed, lacks CAP_SYS_RESOURCE.
func lacksSysResource() bool {
	status, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		if set, ok := strings.CutPrefix(line, "CapBnd:"); ok {
			bits, err := strconv.ParseUint(strings.TrimSpace(set), 16, 64)
			return err == nil && bits&(1<<capSysResource) == 0
		}
	}
	return false
}

func fitFile(file string, isProcess bool) error {
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var spec map[string]any
	decoder := json.NewDecoder(strings.NewReader(string(content)))
	decoder.UseNumber() // seccomp arguments are 64-bit: a float64 would lose digits
	if err := decoder.Decode(&spec); err != nil {
		return err
	}
	process := spec
	if !isProcess {
		process, _ = spec["process"].(map[string]any)
	}
	fit(process)
	content, err = json.Marshal(spec)
	if err != nil {
		return err
	}
	return os.WriteFile(file, content, 0o644)
}

func fit(process map[string]any) {
	capabilities, _ := process["capabilities"].(map[string]any)
	for set, value := range capabilities {
		kept := []any{}
		list, _ := value.([]any)
		for _, capability := range list {
			if capability != "CAP_SYS_RESOURCE" {
				kept = append(kept, capability)
			}
		}
		capabilities[set] = kept
	}
	if rlimits, ok := process["rlimits"].([]any); ok {
		kept := []any{} // keep only the limit of open files, at most this process's own; the others are inherited
		var own syscall.Rlimit
		syscall.Getrlimit(syscall.RLIMIT_NOFILE, &own)
		for _, value := range rlimits {
			if rlimit, _ := value.(map[string]any); rlimit["type"] == "RLIMIT_NOFILE" {
				rlimit["hard"] = min(integer(rlimit["hard"]), own.Max)
				rlimit["soft"] = min(integer(rlimit["soft"]), own.Max)
				kept = append(kept, rlimit)
			}
		}
		process["rlimits"] = kept
	}
	if score, ok := process["oomScoreAdj"].(json.Number); ok {
		asked, _ := score.Int64()
		content, _ := os.ReadFile("/proc/self/oom_score_adj")
		own, _ := strconv.ParseInt(strings.TrimSpace(string(content)), 10, 64)
		process["oomScoreAdj"] = max(asked, own)
	}
}

func integer(value any) uint64 {
	n, _ := strconv.ParseUint(fmt.Sprint(value), 10, 64)
	return n
}
