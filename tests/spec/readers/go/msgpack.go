package main

import (
	"encoding/binary"
	"errors"
	"math"
)

var errMalformed = errors.New("not one MessagePack value")

// decode reads one MessagePack value that is the whole of data: nil, bool, int64, uint64 (from 2^63 on), float64,
// string, []byte, []any or map[string]any.
func decode(data []byte) (value any, err error) {
	defer func() {
		if recover() != nil { // read behind the end
			err = errMalformed
		}
	}()
	d := decoder{data: data}
	value = d.value(0)
	if d.bad || d.at != len(data) {
		return nil, errMalformed
	}
	return value, nil
}

type decoder struct {
	data []byte
	at   int
	bad  bool
}

const deepest = 100

func (d *decoder) take(n int) []byte {
	if n < 0 || n > len(d.data)-d.at {
		panic(errMalformed)
	}
	d.at += n
	return d.data[d.at-n : d.at]
}

func (d *decoder) number(width int) uint64 {
	var wide [8]byte
	copy(wide[8-width:], d.take(width))
	return binary.BigEndian.Uint64(wide[:])
}

func (d *decoder) array(n, depth int) any {
	found := []any{}
	for ; n > 0; n-- {
		found = append(found, d.value(depth+1))
	}
	return found
}

func (d *decoder) dict(n, depth int) any {
	found := map[string]any{}
	for ; n > 0; n-- {
		key, isText := d.value(depth + 1).(string)
		d.bad = d.bad || !isText
		found[key] = d.value(depth + 1)
	}
	return found
}

func unsigned(n uint64) any {
	if n > math.MaxInt64 {
		return n
	}
	return int64(n)
}

func (d *decoder) value(depth int) any {
	if depth > deepest {
		panic(errMalformed)
	}
	head := d.take(1)[0]
	switch {
	case head < 0x80:
		return int64(head)
	case head < 0x90:
		return d.dict(int(head&15), depth)
	case head < 0xa0:
		return d.array(int(head&15), depth)
	case head < 0xc0:
		return string(d.take(int(head & 31)))
	case head >= 0xe0:
		return int64(int8(head))
	}
	switch head {
	case 0xc0:
		return nil
	case 0xc2, 0xc3:
		return head == 0xc3
	case 0xc4, 0xc5, 0xc6:
		return d.take(int(d.number(1 << (head - 0xc4))))
	case 0xca:
		return float64(math.Float32frombits(uint32(d.number(4))))
	case 0xcb:
		return math.Float64frombits(d.number(8))
	case 0xcc, 0xcd, 0xce, 0xcf:
		return unsigned(d.number(1 << (head - 0xcc)))
	case 0xd0:
		return int64(int8(d.number(1)))
	case 0xd1:
		return int64(int16(d.number(2)))
	case 0xd2:
		return int64(int32(d.number(4)))
	case 0xd3:
		return int64(d.number(8))
	case 0xd9, 0xda, 0xdb:
		return string(d.take(int(d.number(1 << (head - 0xd9)))))
	case 0xdc, 0xdd:
		return d.array(int(d.number(2<<(head-0xdc))), depth)
	case 0xde, 0xdf:
		return d.dict(int(d.number(2<<(head-0xde))), depth)
	}
	panic(errMalformed)
}
