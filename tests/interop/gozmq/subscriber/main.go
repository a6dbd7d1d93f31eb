// Command subscriber reads one of kvbus's streams with go-zeromq, as llm-d does, and prints the messages that it gets.
//
//	subscriber LIVE REPLAY
//
// Each printed line is a JSON object with the kind of event ("connected", "lost", "message", "answer") and the frames of
// a message in hex. One connection requests a replay every second, from the seq after the last batch that it got.
package main

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"log"
	"os"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
)

// redial is llm-d's pause after a connection broke.
const redial = 5 * time.Second

type line struct {
	What   string   `json:"what"`
	Error  string   `json:"error,omitempty"`
	Frames []string `json:"frames,omitempty"`
}

var (
	printing sync.Mutex
	encoder  = json.NewEncoder(os.Stdout)
)

func tell(what string, err error, frames [][]byte) {
	said := line{What: what}
	if err != nil {
		said.Error = err.Error()
	}
	for _, frame := range frames {
		said.Frames = append(said.Frames, hex.EncodeToString(frame))
	}
	printing.Lock()
	defer printing.Unlock()
	if err := encoder.Encode(said); err != nil {
		log.Fatal(err)
	}
}

// follow prints every message of the live stream until the connection breaks.
func follow(endpoint string) error {
	sub := zmq4.NewSub(context.Background())
	defer sub.Close()
	if err := sub.Dial(endpoint); err != nil {
		return err
	}
	if err := sub.SetOption(zmq4.OptionSubscribe, ""); err != nil {
		return err
	}
	tell("connected", nil, nil)
	for {
		message, err := sub.Recv()
		if err != nil {
			return err
		}
		tell("message", nil, message.Frames)
	}
}

// ask requests one replay after the other on one connection. Each continues where the answer before ended.
func ask(endpoint string) error {
	dealer := zmq4.NewDealer(context.Background())
	defer dealer.Close()
	if err := dealer.Dial(endpoint); err != nil {
		return err
	}
	tell("connected", nil, nil)
	end := ^uint64(0)
	for next := uint64(0); ; time.Sleep(time.Second) {
		start := binary.BigEndian.AppendUint64(nil, next)
		if err := dealer.Send(zmq4.NewMsgFrom(nil, start)); err != nil {
			return err
		}
		for over := false; !over; {
			message, err := dealer.Recv()
			if err != nil {
				return err
			}
			tell("answer", nil, message.Frames)
			if count := len(message.Frames); count == 4 && len(message.Frames[2]) == 8 {
				seq := binary.BigEndian.Uint64(message.Frames[2])
				over = seq == end
				if !over {
					next = seq + 1
				}
			}
		}
	}
}

// again calls a function for ever, with llm-d's pause between two calls.
func again(do func(string) error, endpoint string) {
	for {
		tell("lost", do(endpoint), nil)
		time.Sleep(redial)
	}
}

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: subscriber LIVE REPLAY")
	}
	go again(ask, os.Args[2])
	again(follow, os.Args[1])
}
