{{- /* Refuse contradictions that a schema cannot express. Each message names the value to change. */ -}}
{{- define "kvbus.check" -}}
{{- $v := .Values.kvbus -}}
{{- if not (and (kindIs "map" $v) (hasKey $v "router")) -}}
{{- fail "kvbus-lib: give the dependency an alias, so that its values are found under kvbus:\n  dependencies:\n    - {name: kvbus-lib, version: 0.1.0, repository: …, alias: kvbus}" -}}
{{- end -}}
{{- range $key, $instead := dict "http" "kvbus.ports.http" "model" "kvbus.model" "state_dir" "kvbus.state" -}}
{{- if hasKey $v.config $key -}}
{{- fail (printf "kvbus.config.%s: set %s, from which it follows" $key $instead) -}}
{{- end -}}
{{- end -}}
{{- range $value, $keys := dict "tlsSecret" (list "http_tls_certificate_file" "http_tls_key_file") "tokensSecret" (list "http_tokens_file") -}}
{{- range $key := $keys -}}
{{- if and (get $v.http $value) (hasKey $v.config $key) -}}
{{- fail (printf "kvbus.config.%s follows from kvbus.http.%s: set one of them" $key $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if hasKey $v.config "http_open" -}}
{{- fail "kvbus.config.http_open: set kvbus.http.open, from which it follows" -}}
{{- end -}}
{{- if and $v.config.sources (gt (int $v.dataParallelSize) 1) -}}
{{- fail "kvbus.dataParallelSize has no effect with kvbus.config.sources: set data_parallel_size in the source" -}}
{{- end -}}
{{- if $v.config.outputs -}}
{{- range $name := list "events" "replay" -}}
{{- if get $v.ports $name -}}
{{- fail (printf "kvbus.ports.%s has no effect with kvbus.config.outputs: set the endpoint in the output" $name) -}}
{{- end -}}
{{- end -}}
{{- else if eq $v.router "aibrix" -}}
{{- if or (ne (int ($v.ports.events | default 5557)) 5557) (ne (int ($v.ports.replay | default 5558)) 5558) -}}
{{- fail "kvbus.router=aibrix: AIBrix connects to 5557 and 5558 only; leave kvbus.ports.events and kvbus.ports.replay empty" -}}
{{- end -}}
{{- end -}}
{{- if hasKey $v.config "interpose" -}}
{{- fail "kvbus.config.interpose: set kvbus.interpose, from which source and output follow" -}}
{{- end -}}
{{- if and (hasKey $v.config "front") (eq $v.router "vllm-router") -}}
{{- fail "kvbus.config.front has no effect with kvbus.router=vllm-router: that router asks no engine for its ports; name kvbus's endpoints in its flags" -}}
{{- end -}}
{{- if $v.interpose -}}
{{- if $v.config.outputs -}}
{{- fail "kvbus.interpose has no effect with kvbus.config.outputs: set interpose in the output" -}}
{{- end -}}
{{- if $v.ports.events -}}
{{- fail "kvbus.ports.events has no effect with kvbus.interpose: routers dial kvbus.engineEvents.port" -}}
{{- end -}}
{{- if has $v.router (list "llm-d" "aibrix") -}}
{{- fail (printf "kvbus.interpose: kvbus.router=%s dials the pod's address, and needs the ports of its own that kvbus has without it" $v.router) -}}
{{- end -}}
{{- if $v.curve.existingSecret -}}
{{- fail "kvbus.interpose: there is no CURVE at a port that engines dial, too" -}}
{{- end -}}
{{- end -}}
{{- if and (has $v.router (list "llm-d" "aibrix")) (not (include "kvbus.modelName" .)) -}}
{{- fail (printf "kvbus.router=%s needs kvbus.model: the router knows the pod's model by it" $v.router) -}}
{{- end -}}
{{- if and (eq $v.router "aibrix") (not (regexMatch "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$" (include "kvbus.modelName" .))) -}}
{{- fail (printf "kvbus.router=aibrix: AIBrix finds a model by a pod label, and %q cannot be one; serve it under a plain name and set kvbus.model, for example qwen3-32b" (include "kvbus.modelName" .)) -}}
{{- end -}}
{{- range $v.env -}}
{{- if hasPrefix "KVBUS_" .name -}}
{{- fail (printf "kvbus.env: %s is a key of kvbus.yaml: set it in kvbus.config" .name) -}}
{{- end -}}
{{- end -}}
{{- if and $v.state.existingClaim (not $v.state.enabled) -}}
{{- fail "kvbus.state.existingClaim has no effect with kvbus.state.enabled=false" -}}
{{- end -}}
{{- end -}}
