{{- define "kvbus.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvbus.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvbus.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{ include "kvbus.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- /* (dict "image" … "default" tag) */ -}}
{{- define "kvbus.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .default }}
{{- end -}}
{{- end -}}

{{- /* Contradictions that a schema cannot see. */ -}}
{{- define "kvbus.check" -}}
{{- $taken := dict -}}
{{- $ranks := int .Values.engine.dataParallelSize -}}
{{- $spans := list
  (list "kvbus.ports.events" .Values.kvbus.ports.events $ranks)
  (list "kvbus.ports.replay" .Values.kvbus.ports.replay $ranks)
  (list "kvbus.ports.http" .Values.kvbus.ports.http 1)
  (list "engine.events.port" .Values.engine.events.port $ranks)
  (list "engine.events.replayPort" .Values.engine.events.replayPort $ranks)
  (list "engine.httpPort" .Values.engine.httpPort 1) -}}
{{- range $span := $spans -}}
{{- range $i := until (int (index $span 2)) -}}
{{- $port := add (int (index $span 1)) $i | toString -}}
{{- if hasKey $taken $port -}}
{{- fail (printf "%s and %s both need port %s: rank r of %d is at port + r, leave that much room between them, for example kvbus.ports.replay=5757 and engine.events.replayPort=5587" (get $taken $port) (index $span 0) $port $ranks) -}}
{{- end -}}
{{- $_ := set $taken $port (index $span 0) -}}
{{- end -}}
{{- end -}}
{{- range $key := list "sources" "outputs" "model" "http" -}}
{{- if hasKey $.Values.kvbus.extraConfig $key -}}
{{- fail (printf "kvbus.extraConfig.%s: this key follows from the chart's own values; set those" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvbus.config" -}}
{{- $source := dict
  "name" "engine"
  "endpoint" (printf "tcp://127.0.0.1:%d" (int .Values.engine.events.port))
  "replay_endpoint" (printf "tcp://127.0.0.1:%d" (int .Values.engine.events.replayPort))
  "bind" true
  "data_parallel_size" (int .Values.engine.dataParallelSize) -}}
{{- $output := dict
  "name" "routers"
  "endpoint" (printf "tcp://*:%d" (int .Values.kvbus.ports.events))
  "replay_endpoint" (printf "tcp://*:%d" (int .Values.kvbus.ports.replay))
  "profile" .Values.kvbus.profile -}}
{{- if eq .Values.kvbus.profile "llm-d" -}}
{{- /* llm-d reads pod and model off the topic: exactly three parts */ -}}
{{- $_ := set $output "topic" "kv@{worker}@{model}" -}}
{{- end -}}
{{- $config := dict
  "model" .Values.model
  "http" (printf "0.0.0.0:%d" (int .Values.kvbus.ports.http))
  "sources" (list $source)
  "outputs" (list $output) -}}
{{- merge $config .Values.kvbus.extraConfig | toYaml -}}
{{- end -}}
