// A reader of KV-cache events that runs the vectors of docs/spec: a set of blocks and no socket.
//
//	go run . DIRECTORY        each vector: what differs from its view, if anything; exit status 1 if one does
//	go run . log DIRECTORY    the same for the vectors of a log
package main

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
)

type vector struct {
	Title  string
	Live   [][]string
	Asks   *uint64
	Replay [][]string
	View   []block
}

type block struct {
	Group  *int64
	Medium string
	Hash   any
}

// key is what a block is known by (8.1): "group medium hash", a hash of 64 bits unsigned (6.6).
func key(group any, medium string, hash any) (string, bool) {
	switch h := hash.(type) {
	case int64:
		hash = uint64(h)
	case uint64:
	case []byte:
		if len(h) == 0 || len(h) > 64 {
			return "", false
		}
		hash = hex.EncodeToString(h)
	default:
		return "", false
	}
	return fmt.Sprint(group, " ", medium, " ", hash), true
}

var tiers = strings.Fields("CPU CPU_PINNED CPU_TIER1 CPU_TIER2 FS DISK NVME STORAGE OBJ EXTERNAL REMOTE NETWORK SHARED")

// mediumOf is a medium's name in capitals, every device GPU; false for one that is unknown (9.1).
func mediumOf(value any) (string, bool) {
	text, isText := value.(string)
	if value == nil {
		return "GPU", true
	}
	name := strings.ToUpper(text)
	if isText && (name == "GPU" || name == "DEVICE") {
		return "GPU", true
	}
	for _, tier := range tiers {
		if isText && name == tier {
			return name, true
		}
	}
	return "", false
}

type reader struct {
	next    uint64
	asks    *uint64
	waiting [][][]byte
	copies  map[string]int
}

// live takes a message of the SUB socket (2.1, 2.2, 3.4, 3.5).
func (r *reader) live(frames [][]byte) {
	seq, good := sequence(frames)
	switch {
	case len(frames) != 3 || !good || seq < r.next:
	case seq > r.next:
		if r.asks == nil {
			missing := r.next
			r.asks = &missing
		}
		r.waiting = append(r.waiting, frames)
	default:
		r.apply(frames)
	}
}

// replayed takes a message of the DEALER socket (4.2): the sequence is in the last frame but one.
func (r *reader) replayed(frames [][]byte) {
	if seq, good := sequence(frames[len(frames)-3:]); good && seq == r.next {
		r.apply(frames[len(frames)-3:])
	}
	for len(r.waiting) > 0 {
		seq, _ := sequence(r.waiting[0])
		if seq > r.next {
			break
		}
		if seq == r.next {
			r.apply(r.waiting[0])
		}
		r.waiting = r.waiting[1:]
	}
}

func sequence(frames [][]byte) (uint64, bool) {
	if len(frames) < 2 {
		return 0, false
	}
	frame := frames[len(frames)-2]
	if len(frame) != 8 && len(frame) != 24 {
		return 0, false
	}
	seq := binary.BigEndian.Uint64(frame)
	return seq, seq < 1<<63
}

// apply takes the next batch. One that cannot be read has its number all the same (6.13).
func (r *reader) apply(frames [][]byte) {
	r.next++
	value, err := decode(frames[len(frames)-1])
	batch, isArray := value.([]any)
	if err != nil || !isArray || len(batch) < 2 {
		return
	}
	events, _ := batch[1].([]any)
	for _, event := range events {
		r.event(named(event))
	}
}

var (
	storedFields  = strings.Fields("type block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx")
	removedFields = strings.Fields("type block_hashes medium group_idx")
)

// named is an event with the names of its fields (6.2).
func named(event any) map[string]any {
	if fields, isMap := event.(map[string]any); isMap {
		return fields
	}
	found := map[string]any{}
	row, _ := event.([]any)
	names := storedFields
	if len(row) > 0 && row[0] == "BlockRemoved" {
		names = removedFields
	}
	for i, value := range row {
		if i < len(names) {
			found[names[i]] = value
		}
	}
	return found
}

func (r *reader) event(event map[string]any) {
	hashes, _ := event["block_hashes"].([]any)
	medium, known := mediumOf(event["medium"])
	names := []string{}
	for _, hash := range hashes {
		name, good := key(event["group_idx"], medium, hash)
		if !good {
			return
		}
		names = append(names, name)
	}
	switch event["type"] {
	case "BlockStored":
		size, _ := event["block_size"].(int64)
		tokens, _ := event["token_ids"].([]any)
		if known && int64(len(tokens)) == int64(len(hashes))*size && allTokens(tokens) {
			for _, name := range names {
				r.copies[name]++
			}
		}
	case "BlockRemoved":
		for _, name := range names {
			if r.copies[name]--; r.copies[name] <= 0 {
				delete(r.copies, name)
			}
		}
	case "AllBlocksCleared":
		r.copies = map[string]int{}
	}
}

// allTokens is whether each is a token id, or a pair of them (6.9).
func allTokens(tokens []any) bool {
	for _, token := range tokens {
		if pair, isPair := token.([]any); isPair && len(pair) == 2 {
			if !allTokens(pair) {
				return false
			}
			continue
		}
		id, isNumber := token.(int64)
		if !isNumber || id < 0 || id >= 1<<32 {
			return false
		}
	}
	return true
}

func unhex(message []string) [][]byte {
	frames := [][]byte{}
	for _, frame := range message {
		data, err := hex.DecodeString(frame)
		if err != nil {
			panic(err)
		}
		frames = append(frames, data)
	}
	return frames
}

// run says what differs from the vector; empty if nothing does.
func run(v vector) string {
	r := reader{copies: map[string]int{}}
	for _, message := range v.Live {
		r.live(unhex(message))
	}
	if (r.asks == nil) != (v.Asks == nil) || (r.asks != nil && *r.asks > *v.Asks) {
		return "it asks for another replay"
	}
	for _, message := range v.Replay {
		r.replayed(unhex(message))
	}
	expected, found := viewOf(v.View), r.view()
	if strings.Join(found, ",") != strings.Join(expected, ",") {
		return fmt.Sprint("it has ", found, ", expected ", expected)
	}
	return ""
}

// view is the live blocks, sorted.
func (r *reader) view() []string {
	found := []string{}
	for name := range r.copies {
		found = append(found, name)
	}
	sort.Strings(found)
	return found
}

// viewOf is the same of a vector's view.
func viewOf(view []block) []string {
	expected := []string{}
	for _, block := range view {
		var group, hash any = nil, block.Hash
		if block.Group != nil {
			group = *block.Group
		}
		if number, isNumber := hash.(json.Number); isNumber {
			var signed int64
			var wide uint64
			if _, err := fmt.Sscan(number.String(), &signed); err == nil {
				hash = signed
			} else if _, err := fmt.Sscan(number.String(), &wide); err == nil {
				hash = wide
			}
		} else if text, isText := hash.(string); isText {
			hash, _ = hex.DecodeString(text)
		}
		name, _ := key(group, block.Medium, hash)
		expected = append(expected, name)
	}
	sort.Strings(expected)
	return expected
}

func main() {
	if os.Args[1] == "log" {
		os.Exit(all(os.Args[2], runLog))
	}
	os.Exit(all(os.Args[1], run))
}

// all runs each vector of a directory; the exit status is 1 if one differs, or if there is none.
func all[V any](directory string, run func(V) string) int {
	files, _ := filepath.Glob(filepath.Join(directory, "*.json"))
	status := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			panic(err)
		}
		var v V
		reading := json.NewDecoder(bytes.NewReader(text))
		reading.UseNumber()
		if err := reading.Decode(&v); err != nil {
			panic(err)
		}
		wrong := run(v)
		if wrong != "" {
			status = 1
		}
		fmt.Printf("%s: %s\n", strings.TrimSuffix(filepath.Base(file), ".json"), wrong)
	}
	if len(files) == 0 {
		status = 1
	}
	return status
}
