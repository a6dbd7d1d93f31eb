// Command subscriber follows one of kvbus's streams with go-zeromq, as llm-d does, and writes down what it is given.
//
//	subscriber LIVE REPLAY
//
// Each line it prints is a JSON object: what happened ("connected", "lost", "message", "answer"), and a message's
// frames in hex. One connection asks the replay every second, from the seq after the last one it was given.
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

// redial is how long llm-d waits after a connection broke.
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

// follow hands on every message of the live stream until the connection breaks.
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

// ask takes answer after answer on one connection, each from where the one before ended.
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

// again does it for ever, with llm-d's pause in between.
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
