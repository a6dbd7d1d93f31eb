// Command publisher is an engine's publisher on go-zeromq, like that of llm-d's inference simulator.
//
//	publisher bind|dial LIVE REPLAY
//
// It prints a line when a peer has subscribed. Each line of its input is the payload of a batch in hex. The program
// numbers the batch, publishes it, and keeps it for the replay.
package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"log"
	"os"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
)

var (
	mu   sync.Mutex
	kept [][]byte
)

// serve answers each replay request with every batch from the requested number on, and then END.
func serve(router zmq4.Socket) {
	end := []byte{255, 255, 255, 255, 255, 255, 255, 255}
	for {
		request, err := router.Recv()
		if err != nil {
			log.Fatalf("replay: %v", err)
		}
		if len(request.Frames) != 3 || len(request.Frames[2]) != 8 {
			log.Printf("replay: a request of %d frames: %x", len(request.Frames), request.Frames)
			continue
		}
		peer, start := request.Frames[0], binary.BigEndian.Uint64(request.Frames[2])
		mu.Lock()
		batches := kept
		mu.Unlock()
		for seq := start; seq < uint64(len(batches)); seq++ {
			number := binary.BigEndian.AppendUint64(nil, seq)
			if err := router.Send(zmq4.NewMsgFrom(peer, nil, nil, number, batches[seq])); err != nil {
				log.Printf("replay: %v", err)
			}
		}
		if err := router.Send(zmq4.NewMsgFrom(peer, nil, nil, end, nil)); err != nil {
			log.Printf("replay: %v", err)
		}
	}
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: publisher bind|dial LIVE REPLAY")
	}
	router := zmq4.NewRouter(context.Background())
	must(router.Listen(os.Args[3]))
	go serve(router)

	pub := zmq4.NewPub(context.Background())
	if os.Args[1] == "bind" {
		must(pub.Listen(os.Args[2]))
	} else {
		must(pub.Dial(os.Args[2]))
	}
	for len(pub.(zmq4.Topics).Topics()) == 0 {
		time.Sleep(10 * time.Millisecond)
	}
	fmt.Println("subscribed")

	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		payload, err := hex.DecodeString(lines.Text())
		must(err)
		mu.Lock()
		seq := uint64(len(kept))
		kept = append(kept, payload)
		mu.Unlock()
		number := binary.BigEndian.AppendUint64(nil, seq)
		must(pub.Send(zmq4.NewMsgFrom(nil, number, payload)))
	}
	must(lines.Err())
}
