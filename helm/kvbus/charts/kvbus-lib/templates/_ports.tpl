{{- /*
Every port of the pod that this configuration uses, as JSON: [{name, port, key, open}]. `key` is the value to change. `open` is
whether peers outside the pod may connect; it is false for an engine's own ports.
*/ -}}
{{- define "kvbus.claims" -}}
{{- $v := .Values.kvbus -}}
{{- $config := include "kvbus.config" . | fromJson -}}
{{- $slots := include "kvbus.slots" $config.sources | fromJsonArray -}}
{{- $claims := list (dict "name" "kvbus-http" "port" (int $v.ports.http) "key" "kvbus.ports.http" "open" true) -}}
{{- range $o, $output := $config.outputs -}}
{{- $several := and (gt (len $slots) 1) (eq ($output.layout | default "per_source") "per_source") -}}
{{- $wanted := list (list "events" "endpoint" (ne (include "kvbus.listens" $output) "")) (list "replay" "replay_endpoint" true) (list "snap" "snapshot_endpoint" true) -}}
{{- range $item := $wanted -}}
{{- $what := index $item 0 -}}
{{- $endpoint := get $output (index $item 1) | default "" -}}
{{- if and (index $item 2) (hasPrefix "tcp://" $endpoint) -}}
{{- range $i := ternary $slots (list 0) (eq ($output.layout | default "per_source") "per_source") -}}
{{- $i = int $i -}}
{{- $key := ternary (printf "kvbus.config.outputs[%d].%s" $o (index $item 1)) (printf "kvbus.ports.%s" $what) (not (empty $v.config.outputs)) -}}
{{- /* the engine's own address is on loopback, so its routers are in the pod */ -}}
{{- $open := not (and $output.interpose (hasPrefix "tcp://127." $endpoint)) -}}
{{- $name := printf "kv%s-%s%s" (ternary "" (toString $o) (eq $o 0)) $what (ternary (printf "-%d" $i) "" $several) -}}
{{- $claims = append $claims (dict "name" $name "port" (add (include "kvbus.portOf" $endpoint | int) $i) "key" $key "open" $open) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $interposed := false -}}
{{- range $config.outputs -}}
{{- $interposed = or $interposed (default false .interpose) -}}
{{- end -}}
{{- range $s, $source := $config.sources -}}
{{- range $what := list "endpoint" "replay_endpoint" "snapshot_endpoint" -}}
{{- $endpoint := get $source $what | default "" -}}
{{- $bound := and (eq $what "endpoint") (default false $source.bind) -}}
{{- $loopback := or (hasPrefix "tcp://127." $endpoint) (hasPrefix "tcp://localhost:" $endpoint) -}}
{{- if and (hasPrefix "tcp://" $endpoint) (or $bound $loopback) (not (and $bound $interposed)) -}}
{{- range $i := until (int ($source.data_parallel_size | default 1)) -}}
{{- $key := ternary (printf "kvbus.config.sources[%d].%s" $s $what) (printf "kvbus.engineEvents.%s" (ternary "port" "replayPort" (eq $what "endpoint"))) (not (empty $v.config.sources)) -}}
{{- $name := ternary (printf "kv-in%s-%d" (ternary "" (toString $s) (eq $s 0)) $i) "" (not $loopback) -}}
{{- $claims = append $claims (dict "name" $name "port" (add (include "kvbus.portOf" $endpoint | int) $i) "key" $key "open" (not $loopback)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $taken := dict (toString $v.servingPort) "kvbus.servingPort" -}}
{{- range $claims -}}
{{- if gt (int .port) 65535 -}}
{{- fail (printf "%s: rank r is at port + r, and %d is no port" .key (int .port)) -}}
{{- end -}}
{{- if hasKey $taken (toString .port) -}}
{{- fail (printf "%s and %s both need port %d: rank r is at port + r, so leave that much room between them" (get $taken (toString .port)) .key (int .port)) -}}
{{- end -}}
{{- $_ := set $taken (toString .port) .key -}}
{{- end -}}
{{- toJson (dict "claims" $claims) -}}
{{- end -}}

{{- define "kvbus.portOf" -}}
{{- regexFind "[0-9]+$" . -}}
{{- end -}}

{{- /* Container ports, which are only informative. */ -}}
{{- define "kvbus.ports" -}}
{{- range (include "kvbus.claims" . | fromJson).claims -}}
{{- if .open }}
- name: {{ .name }}
  containerPort: {{ .port }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The open ports for a Service, by number, because not every cluster finds a native sidecar's ports by name. */ -}}
{{- define "kvbus.servicePorts" -}}
{{- range (include "kvbus.claims" . | fromJson).claims -}}
{{- if .open }}
- name: {{ .name }}
  port: {{ .port }}
  targetPort: {{ .port }}
{{- end -}}
{{- end -}}
{{- end -}}
