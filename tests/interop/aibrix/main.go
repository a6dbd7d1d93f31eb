// Command aibrix runs AIBrix's KV-event synchronisation without Kubernetes: AIBrix's own ZMQ client, manager and prefix
// table. It is built with `-tags zmq`, as AIBrix's gateway is.
//
//	aibrix < LINES
//
// The first line of the input names the streams, {"streams": [{"name": …, "live": …}]}. Each stream is a pod at the host
// of its live endpoint, with the ports 5557 and 5558. Each further line, {"known": [[hash, parent, [token, …]], …]}, asks
// which of these blocks the table holds. Parents come first. The answer is {"held": [hash, …]}.
package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"log"
	"net/url"
	"os"

	"github.com/vllm-project/aibrix/pkg/constants"
	"github.com/vllm-project/aibrix/pkg/kvevent"
	"github.com/vllm-project/aibrix/pkg/utils"
	table "github.com/vllm-project/aibrix/pkg/utils/syncprefixcacheindexer"
)

const (
	model  = "m"
	noLora = -1
)

// pods replaces AIBrix's cache of Kubernetes objects.
type pods map[string]*kvevent.PodInfo

func (p pods) GetPod(_ context.Context, key string) (*kvevent.PodInfo, bool) {
	pod, found := p[key]
	return pod, found
}

func (p pods) RangePods(_ context.Context, do func(string, *kvevent.PodInfo) bool) error {
	for key, pod := range p {
		if !do(key, pod) {
			break
		}
	}
	return nil
}

// indexer passes events to AIBrix's prefix table, as AIBrix's cache does.
type indexer struct{ *table.SyncPrefixHashTable }

func (i indexer) GetSyncIndexer(context.Context) (kvevent.SyncIndexer, error) { return i, nil }

func (i indexer) ProcessBlockStored(_ context.Context, event kvevent.BlockStoredEvent) error {
	return i.SyncPrefixHashTable.ProcessBlockStored(table.BlockStored{
		BlockHashes: event.BlockHashes, ModelName: event.ModelName, LoraID: event.LoraID,
		SourcePod: event.SourcePod, ParentBlockHash: event.ParentBlockHash, Tokens: event.Tokens,
	})
}

func (i indexer) ProcessBlockRemoved(_ context.Context, event kvevent.BlockRemovedEvent) error {
	return i.SyncPrefixHashTable.ProcessBlockRemoved(table.BlockRemoved{
		BlockHashes: event.BlockHashes, ModelName: event.ModelName, LoraID: event.LoraID, SourcePod: event.SourcePod,
	})
}

func (i indexer) RemovePrefix(_ context.Context, model string, lora int64, pod string) error {
	return i.SyncPrefixHashTable.RemovePrefix(model, lora, pod)
}

// block is a block that an engine holds or held, in JSON [hash, parent or null, tokens]. A hash has 64 bits, and may be
// signed.
type block struct {
	hash   json.Number
	parent *json.Number
	tokens []uint32
}

func (b *block) UnmarshalJSON(data []byte) error {
	return json.Unmarshal(data, &[]any{&b.hash, &b.parent, &b.tokens})
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 256<<20)
	var options struct {
		Streams []struct {
			Name string `json:"name"`
			Live string `json:"live"`
		} `json:"streams"`
	}
	if !lines.Scan() {
		log.Fatal("no first line")
	}
	must(json.Unmarshal(lines.Bytes(), &options))
	known := pods{}
	ready := map[string]struct{}{}
	for _, stream := range options.Streams {
		live, err := url.Parse(stream.Live)
		must(err)
		key := utils.GeneratePodKey("default", stream.Name)
		ready[key] = struct{}{}
		known[key] = &kvevent.PodInfo{
			Name: stream.Name, Namespace: "default", PodIP: live.Hostname(), ModelName: model,
			Labels: map[string]string{constants.KVEventsEnabledLabel: "true"},
		}
	}
	prefixes := table.NewSyncPrefixHashTable()
	must(kvevent.NewManager(known, indexer{prefixes}).Start())

	answers := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var asked struct {
			Known []block `json:"known"`
		}
		must(json.Unmarshal(lines.Bytes(), &asked))
		must(answers.Encode(map[string]any{"held": held(prefixes, ready, asked.Known)}))
	}
	must(lines.Err())
}

// held returns the blocks that end a prefix of which the table finds every block.
func held(prefixes *table.SyncPrefixHashTable, ready map[string]struct{}, known []block) []json.Number {
	paths := map[json.Number][]byte{}
	found := []json.Number{}
	for _, b := range known {
		var path []byte
		if b.parent != nil {
			path = append(path, paths[*b.parent]...)
		}
		for _, token := range b.tokens {
			path = binary.BigEndian.AppendUint32(path, token)
		}
		paths[b.hash] = path
		matches, _ := prefixes.MatchPrefix(model, noLora, path, ready)
		for _, percent := range matches {
			if percent == 100 {
				found = append(found, b.hash)
				break
			}
		}
	}
	return found
}
