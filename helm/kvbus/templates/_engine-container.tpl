{{- /* vLLM dials a concrete host and binds its replay there: both stay on loopback, kvbus binds the first (bind: true). */ -}}
{{- define "kvbus.engineEventsConfig" -}}
{{- dict
  "enable_kv_cache_events" true
  "publisher" "zmq"
  "endpoint" (printf "tcp://127.0.0.1:%d" (int .Values.engine.events.port))
  "replay_endpoint" (printf "tcp://127.0.0.1:%d" (int .Values.engine.events.replayPort))
  "topic" "" | toJson -}}
{{- end -}}

{{- define "kvbus.engineContainer" -}}
name: engine
image: {{ include "kvbus.image" (dict "image" .Values.engine.image "default" "latest") }}
imagePullPolicy: {{ .Values.engine.image.pullPolicy }}
args:
  {{- if kindIs "slice" .Values.engine.args }}
  {{- toYaml .Values.engine.args | nindent 2 }}
  {{- else }}
  - --model={{ .Values.model }}
  - --port={{ .Values.engine.httpPort }}
  - --enable-prefix-caching
  {{- if gt (int .Values.engine.dataParallelSize) 1 }}
  - --data-parallel-size={{ .Values.engine.dataParallelSize }}
  {{- end }}
  - --kv-events-config
  - {{ include "kvbus.engineEventsConfig" . | quote }}
  {{- end }}
  {{- with .Values.engine.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.engine.env }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - name: http
    containerPort: {{ .Values.engine.httpPort }}
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
{{- with .Values.engine.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.engine.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
