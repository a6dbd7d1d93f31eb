{{- /*
kvbus's configuration, made from .Values.kvbus. Ports, environment and ConfigMap all read it from "kvbus.config", so that they
always agree.
*/ -}}

{{- define "kvbus.presets" -}}
generic:  {profile: vllm, events: 5657, layout: per_source}
dynamo:   {profile: dynamo, events: 5657, layout: per_source}
mooncake: {profile: mooncake, events: 5657, layout: per_source}
sglang:   {profile: sglang, events: 5657, layout: per_source}
smg:      {profile: smg, events: 5657, layout: per_source}
# ignores messages with a topic: the profile sends none
vllm-router: {profile: vllm-router, events: 5657, layout: per_source}
# reads pod and model from the topic, which must have three parts; a clear is for the complete pod, so all ranks share a stream
llm-d:    {profile: llm-d, events: 5657, layout: merged, topic: "kv@{worker}@{model}"}
# files the blocks of all ranks under its own pod
kthena:   {profile: kthena, events: 5657, layout: merged}
# connects to only two ports, so all ranks share them
aibrix:   {profile: aibrix, events: 5557, layout: merged}
{{- end -}}

{{- define "kvbus.modelName" -}}
{{- if .Values.kvbus.model -}}
{{- .Values.kvbus.model -}}
{{- else if kindIs "string" .Values.model -}}
{{- .Values.model -}}
{{- end -}}
{{- end -}}

{{- /* The complete configuration as JSON. */ -}}
{{- define "kvbus.config" -}}
{{- include "kvbus.check" . -}}
{{- $v := .Values.kvbus -}}
{{- $preset := get (include "kvbus.presets" . | fromYaml) $v.router -}}
{{- $config := deepCopy $v.config -}}
{{- /* on the pod's address, for the kubelet and Prometheus; kvbus only shows token ids to loopback and clients with credentials */ -}}
{{- $_ := set $config "http" (printf "0.0.0.0:%d" (int $v.ports.http)) -}}
{{- with include "kvbus.modelName" . -}}
{{- $_ := set $config "model" . -}}
{{- end -}}
{{- if $v.http.tlsSecret -}}
{{- $_ := set $config "http_tls_certificate_file" "/etc/kvbus-http/tls/tls.crt" -}}
{{- $_ := set $config "http_tls_key_file" "/etc/kvbus-http/tls/tls.key" -}}
{{- end -}}
{{- if $v.http.tokensSecret -}}
{{- $_ := set $config "http_tokens_file" "/etc/kvbus-http/tokens/tokens" -}}
{{- end -}}
{{- if ne $v.http.open "status" -}}
{{- $_ := set $config "http_open" $v.http.open -}}
{{- end -}}
{{- $_ := set $config "state_dir" (ternary "/var/lib/kvbus" nil $v.state.enabled) -}}
{{- if not $config.sources -}}
{{- $port := int $v.engineEvents.port -}}
{{- $source := dict
  "name" "engine"
  "endpoint" (printf "tcp://127.0.0.1:%d" $port)
  "replay_endpoint" (printf "tcp://127.0.0.1:%d" (int ($v.engineEvents.replayPort | default (add $port (max 100 (int $v.dataParallelSize))))))
  "bind" true
  "data_parallel_size" (int $v.dataParallelSize) -}}
{{- $_ := set $config "sources" (list $source) -}}
{{- end -}}
{{- if and $v.interpose (not $config.outputs) -}}
{{- $output := dict
  "name" "routers"
  "endpoint" (index $config.sources 0).endpoint
  "interpose" true
  "layout" "per_source"
  "profile" $preset.profile -}}
{{- with $v.ports.replay -}}
{{- $_ := set $output "replay_endpoint" (printf "tcp://127.0.0.1:%d" (int .)) -}}
{{- end -}}
{{- $_ := set $config "outputs" (list $output) -}}
{{- end -}}
{{- if not $config.outputs -}}
{{- /* a port per discovered engine would change when engines come and go; each stream of a log has its own seqs */ -}}
{{- $logged := ne (include "kvbus.logged" $config.sources) "" -}}
{{- $layout := ternary (ternary "per_topic" "merged" $logged) $preset.layout (ne (include "kvbus.discovers" $config.sources) "") -}}
{{- $streams := ternary (len (include "kvbus.slots" $config.sources | fromJsonArray)) 1 (eq $layout "per_source") -}}
{{- $port := int ($v.ports.events | default $preset.events) -}}
{{- $output := dict
  "name" "routers"
  "endpoint" (printf "tcp://*:%d" $port)
  "layout" $layout
  "profile" $preset.profile -}}
{{- /* a replay request does not name a topic */ -}}
{{- if not $logged -}}
{{- $_ := set $output "replay_endpoint" (printf "tcp://*:%d" (int ($v.ports.replay | default (add $port (ternary 1 (max 100 $streams) (eq $streams 1)))))) -}}
{{- end -}}
{{- with ternary "kv@{source}@{model}" $preset.topic $logged -}}
{{- $_ := set $output "topic" . -}}
{{- end -}}
{{- $_ := set $config "outputs" (list $output) -}}
{{- end -}}
{{- if include "kvbus.curveSecretName" . -}}
{{- range $config.outputs -}}
{{- if and (not .curve_secret_key_file) (include "kvbus.listens" .) -}}
{{- $_ := set . "curve_secret_key_file" "/etc/kvbus-curve/kvbus.key_secret" -}}
{{- $_ := set . "curve_client_keys" "/etc/kvbus-curve/routers.keys" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.router "llm-d") (not $config.worker) -}}
{{- $_ := set $config "worker" (printf "$(POD_IP):%d" (int $v.servingPort)) -}}
{{- end -}}
{{- toJson $config -}}
{{- end -}}

{{- /* "true" if one of these sources is discovered, else empty. */ -}}
{{- define "kvbus.discovers" -}}
{{- range . -}}
{{- if .discover }}true{{ end -}}
{{- end -}}
{{- end -}}

{{- /* "true" if one of these sources is read from a log, else empty. */ -}}
{{- define "kvbus.logged" -}}
{{- range . -}}
{{- $discover := .discover | default dict -}}
{{- if or (hasKey $discover "kafka") (hasKey $discover "nats") (hasKey $discover "redis") }}true{{ end -}}
{{- end -}}
{{- end -}}

{{- /* "true" if routers dial in at this output, else empty. kvbus dials a log's servers itself. */ -}}
{{- define "kvbus.listens" -}}
{{- if not (or (has .type (list "kafka" "nats" "redis")) (and (hasKey . "bind") (not .bind))) }}true{{ end -}}
{{- end -}}

{{- /* The namespaces in which the account must be able to watch pods, as JSON; "" is the release's own. */ -}}
{{- define "kvbus.watched" -}}
{{- $found := list -}}
{{- range .Values.kvbus.config.sources -}}
{{- with (.discover | default dict).kubernetes -}}
{{- $found = append $found (.namespace | default "") -}}
{{- end -}}
{{- end -}}
{{- toJson ($found | uniq | sortAlpha) -}}
{{- end -}}

{{- /* The slot of each rank of a list of sources, as JSON. A stream is at port + slot. */ -}}
{{- define "kvbus.slots" -}}
{{- $slots := list -}}
{{- $next := 0 -}}
{{- range . -}}
{{- if hasKey . "slot" -}}
{{- $next = int .slot -}}
{{- end -}}
{{- range until (int (.data_parallel_size | default 1)) -}}
{{- $slots = append $slots $next -}}
{{- $next = add1 $next -}}
{{- end -}}
{{- end -}}
{{- toJson $slots -}}
{{- end -}}

{{- /* The keys that are set by environment variables, as JSON: all of them, or those in which the cluster fills in $(NAME). */ -}}
{{- define "kvbus.config.variables" -}}
{{- $all := eq .Values.kvbus.configFrom "environment" -}}
{{- $found := dict -}}
{{- range $key, $value := include "kvbus.config" . | fromJson -}}
{{- if or $all (contains "$(" (toJson $value)) -}}
{{- $_ := set $found $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- /* kvbus.yaml, without the keys that are set by environment variables. */ -}}
{{- define "kvbus.config.file" -}}
{{- $config := include "kvbus.config" . | fromJson -}}
{{- range $key, $_ := include "kvbus.config.variables" . | fromJson -}}
{{- $_ := unset $config $key -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{- /*
The value of an engine's --kv-events-config that matches the first source: (list . "vllm") or (list . "sglang").
*/ -}}
{{- define "kvbus.kvEventsConfig" -}}
{{- $config := include "kvbus.config" (index . 0) | fromJson -}}
{{- $source := index $config.sources 0 -}}
{{- $events := dict "publisher" "zmq" "topic" "" -}}
{{- if eq (index . 1) "vllm" -}}
{{- /* SGLang does not have this key: there a publisher enables the events */ -}}
{{- $_ := set $events "enable_kv_cache_events" true -}}
{{- end -}}
{{- /* engines dial a concrete host and bind a wildcard */ -}}
{{- $_ := set $events "endpoint" (ternary $source.endpoint (regexReplaceAll "^tcp://.*:" $source.endpoint "tcp://*:") (default false $source.bind)) -}}
{{- with $source.replay_endpoint -}}
{{- $_ := set $events "replay_endpoint" . -}}
{{- end -}}
{{- toJson $events -}}
{{- end -}}
