package main

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"
	"net/url"
	"regexp"
	"strings"
	"unicode/utf8"
)

// The records of a log, its keys, and how a reader follows: docs/LOG.md.

const (
	maxUnpacked = 512 << 10
	leaseTTL    = 30.0
)

const (
	kindBatch = iota
	kindClear
	kindLease
	kindGone
	kindState
)

type logVector struct {
	Steps []struct {
		At          float64
		Record      *string
		Fields      *fields
		Counted     map[string]int
		Holds       string
		Epoch, Next uint64
		View        []block
	}
	Keys []struct {
		Key    string
		Stream *stream
	}
}

type fields struct {
	Kind, Epoch, Seq, Payload, Origin uint64
	BlockSize                         uint64 `json:"block_size"`
	More, Resync                      bool
}

// readRecord is a record's fields and its payload, or why it is none.
func readRecord(data []byte) (f fields, payload []byte, wrong string) {
	end := len(data) - 5
	if end < 0 || data[end] != 0xce {
		return f, nil, "malformed"
	}
	if crc32.ChecksumIEEE(data[:end]) != binary.BigEndian.Uint32(data[end+1:]) {
		return f, nil, "damaged"
	}
	value, err := decode(data)
	row, _ := value.([]any)
	if err == nil && len(row) > 1 {
		if schema, isNumber := row[0].(int64); isNumber && schema != 2 {
			return f, nil, "other_schema"
		}
	}
	if err != nil || len(row) < 11 {
		return f, nil, "malformed"
	}
	good := true
	number := func(at int) uint64 {
		n, isNumber := row[at].(int64)
		good = good && isNumber && n >= 0
		return uint64(n)
	}
	flag := func(at int) bool {
		value, isFlag := row[at].(bool)
		good = good && isFlag
		return value
	}
	number(0)
	f = fields{number(1), number(2), number(3), 0, number(5), number(6), flag(7), flag(8)}
	packed := flag(9)
	payload, isBytes := row[4].([]byte)
	good = good && f.Epoch > 0 && f.Epoch < 1<<53 && f.Seq < 1<<26-1
	if !good || !isBytes || f.Kind > kindState {
		return f, nil, "malformed"
	}
	if packed {
		if payload, good = unpack(payload); !good {
			return f, nil, "malformed"
		}
	}
	f.Payload = uint64(len(payload))
	return f, payload, ""
}

// unpack is the whole of what zlib has packed, which may not be larger than maxUnpacked.
func unpack(packed []byte) ([]byte, bool) {
	rest := bytes.NewReader(packed)
	unpacking, err := zlib.NewReader(rest)
	if err != nil {
		return nil, false
	}
	whole, err := io.ReadAll(io.LimitReader(unpacking, maxUnpacked+1))
	return whole, err == nil && len(whole) <= maxUnpacked && rest.Len() == 0
}

type follower struct {
	epoch, next uint64
	holds       string
	known       bool // the state that comes is one that the reader has
	heard       float64
	counted     map[string]int
	blocks      reader
}

func (f *follower) void() {
	f.holds = "nothing"
	f.blocks.copies = map[string]int{}
}

// expire is for whoever has had nothing up to now.
func (f *follower) expire(now float64) {
	if f.holds != "nothing" && now-f.heard >= leaseTTL {
		f.counted["expired"]++
		f.void()
	}
}

// take is for the next record of the log.
func (f *follower) take(data []byte, now float64) *fields {
	record, payload, wrong := readRecord(data)
	if wrong != "" {
		f.counted[wrong]++
		return nil
	}
	if record.Epoch < f.epoch {
		if now-f.heard < leaseTTL {
			f.counted["old_epoch"]++
			return &record
		}
		f.expire(now)
		f.counted["clock_set_back"]++
		f.epoch = 0
	}
	f.heard = now
	if record.Epoch > f.epoch {
		f.next = 0
		if f.epoch == 0 {
			f.next = record.Seq
		}
		f.epoch, f.known = record.Epoch, false
		if f.holds != "nothing" {
			f.holds = "former"
		}
	}
	if record.Seq < f.next {
		f.counted["double"]++
		return &record
	}
	if record.Seq > f.next {
		f.counted["lost"] += int(record.Seq - f.next)
		f.known = false
		f.void()
	}
	f.next = record.Seq + 1
	f.given(record, payload)
	return &record
}

func (f *follower) given(record fields, payload []byte) {
	if record.Kind == kindLease {
		return
	}
	if record.Kind == kindGone {
		f.void()
		return
	}
	wanted := "all"
	if record.Kind == kindState {
		wanted = "part"
	}
	if record.Kind == kindClear {
		f.known = f.holds == "all" && !record.Resync
	}
	switch {
	case f.known && record.Kind != kindBatch:
		f.known = record.More
		f.counted["known"]++
		return
	case record.Kind != kindClear && f.holds != wanted:
		f.counted["unusable"]++
		f.void()
		return
	case record.Kind != kindBatch && record.More:
		f.holds = "part"
	default:
		f.holds = "all"
	}
	f.blocks.apply([][]byte{payload})
}

type stream struct {
	Cluster, Model, Worker string
	Rank                   uint64
}

func escape(name string) string {
	if name == "" {
		return "%"
	}
	found := ""
	for _, c := range []byte(name) {
		if c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c == '-' || c == '_' || c == '~' {
			found += string(rune(c))
		} else {
			found += fmt.Sprintf("%%%02X", c)
		}
	}
	return found
}

func (s stream) key() string {
	return fmt.Sprintf("kvbus.v1.%s.%s.%s.%d", escape(s.Cluster), escape(s.Model), escape(s.Worker), s.Rank)
}

var keyPattern = regexp.MustCompile(`^kvbus\.v1\.([^.]+)\.([^.]+)\.([^.]+)\.([0-9]{1,10})$`)

// parse is the stream of a key; nil where no stream has it.
func parse(key string) *stream {
	found := keyPattern.FindStringSubmatch(key)
	if found == nil {
		return nil
	}
	names := []string{}
	for _, segment := range found[1:4] {
		if segment == "%" {
			segment = ""
		}
		name, err := url.PathUnescape(segment)
		if err != nil || !utf8.ValidString(name) {
			return nil
		}
		names = append(names, name)
	}
	s := stream{names[0], names[1], names[2], 0}
	fmt.Sscan(found[4], &s.Rank)
	if s.key() != key {
		return nil
	}
	return &s
}

// runLog says what differs from the vector; empty if nothing does.
func runLog(v logVector) string {
	f := follower{holds: "nothing"}
	f.void()
	for number, step := range v.Steps {
		f.counted = map[string]int{}
		var record *fields
		if step.Record == nil {
			f.expire(step.At)
		} else {
			data, err := hex.DecodeString(*step.Record)
			if err != nil {
				panic(err)
			}
			record = f.take(data, step.At)
		}
		found := said(record, f.counted, f.holds, f.epoch, f.next, f.blocks.view())
		expected := said(step.Fields, step.Counted, step.Holds, step.Epoch, step.Next, viewOf(step.View))
		if found != expected {
			return fmt.Sprintf("step %d: it has %s, expected %s", number, found, expected)
		}
	}
	for _, each := range v.Keys {
		found := parse(each.Key)
		if (found == nil) != (each.Stream == nil) || found != nil && *found != *each.Stream {
			return fmt.Sprintf("key %q: it has %v, expected %v", each.Key, found, each.Stream)
		}
	}
	if len(v.Steps)+len(v.Keys) == 0 {
		return "it has neither steps nor keys"
	}
	return ""
}

// said is what a reader has behind a step, as text that can be compared.
func said(record *fields, counted map[string]int, holds string, epoch, next uint64, view []string) string {
	read := "no record"
	if record != nil {
		read = fmt.Sprintf("%+v", *record)
	}
	return fmt.Sprintf("%s %v, %s to %d/%d: %s", read, counted, holds, epoch, next, strings.Join(view, ","))
}
