// Command llmd runs llm-d's KV-cache index without Kubernetes: llm-d's own subscribers, pool and index.
//
//	llmd < LINES
//
// The first line of the input names the streams, {"streams": [{"name": …, "live": …}]}, and the "model" if it is not m.
// Each further line, {"known": [[hash, parent, [token, …]], …]}, asks which of these blocks the index holds. Parents come
// first. The answer is {"held": [hash, …]}.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"log"
	"os"

	"github.com/go-logr/logr/funcr"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents/engineadapter"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
)

type start struct {
	Streams []struct {
		Name string `json:"name"`
		Live string `json:"live"`
	} `json:"streams"`
	BlockSize int    `json:"block_size"`
	Model     string `json:"model"` // the model that requests name: a model or an adapter
}

// block is a block that an engine holds or held, in JSON [hash, parent or null, tokens].
type block struct {
	hash   uint64
	parent *uint64
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

// held returns the blocks that the index finds on any pod, for a request with their tokens.
func held(ctx context.Context, index kvblock.Index, processor kvblock.TokenProcessor, model string, known []block) []uint64 {
	keys := map[uint64]kvblock.BlockHash{}
	found := []uint64{}
	for _, b := range known {
		parent := kvblock.EmptyBlockHash
		if b.parent != nil {
			parent = keys[*b.parent]
		}
		requestKeys, err := processor.TokensToKVBlockKeys(parent, b.tokens, model, nil)
		must(err)
		keys[b.hash] = requestKeys[len(requestKeys)-1]
		pods, err := index.Lookup(ctx, requestKeys, nil)
		must(err)
		if len(pods) > 0 {
			found = append(found, b.hash)
		}
	}
	return found
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 256<<20)
	logger := funcr.New(func(prefix, args string) { log.Println(prefix, args) }, funcr.Options{})
	ctrllog.SetLogger(logger)
	ctx := ctrllog.IntoContext(context.Background(), logger)

	options := start{Model: "m"}
	if !lines.Scan() {
		log.Fatal("no first line")
	}
	must(json.Unmarshal(lines.Bytes(), &options))

	config := kvblock.DefaultInMemoryIndexConfig()
	config.Size = 1 << 20
	index, err := kvblock.NewInMemoryIndex(config)
	must(err)
	processor, err := kvblock.NewChunkedTokenDatabase(&kvblock.TokenProcessorConfig{BlockSizeTokens: options.BlockSize})
	must(err)
	adapter, err := engineadapter.NewAdapter(engineadapter.EngineTypeVLLM)
	must(err)
	pool := kvevents.NewPool(kvevents.DefaultConfig(), index, processor, adapter)
	pool.Start(ctx)
	subscribers := kvevents.NewSubscriberManager(pool)
	for _, stream := range options.Streams {
		must(subscribers.EnsureSubscriber(ctx, stream.Name, stream.Live, kvevents.DefaultConfig().TopicFilter, true))
	}

	answers := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var asked struct {
			Known []block `json:"known"`
		}
		must(json.Unmarshal(lines.Bytes(), &asked))
		must(answers.Encode(map[string]any{"held": held(ctx, index, processor, options.Model, asked.Known)}))
	}
	must(lines.Err())
}
