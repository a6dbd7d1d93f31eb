{{- /* The engine's container. Its event ports are on loopback and therefore not listed. */ -}}
{{- define "kvbus.engine" -}}
{{- $engine := .Values.engine -}}
{{- $name := include "kvbus.modelName" . -}}
- name: engine
  image: {{ include "kvbus.engineImage" . }}
  imagePullPolicy: {{ ternary .Values.kvbus.image.pullPolicy $engine.image.pullPolicy (eq $engine.type "sim") }}
  {{- with include "kvbus.engineCommand" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if ne $engine.type "sim" }}
  env:
    # the user has no entry in the image: home and name for libraries that look for them
    - {name: HOME, value: /home/engine}
    - {name: USER, value: engine}
    {{- with $engine.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $engine.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - name: http
      containerPort: {{ .Values.kvbus.servingPort }}
  startupProbe:
    {{- include "kvbus.engineStartup" . | nindent 4 }}
  livenessProbe:
    {{- include "kvbus.engineProbe" (list $engine.probes.liveness (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6)) | nindent 4 }}
  readinessProbe:
    {{- include "kvbus.engineProbe" (list $engine.probes.readiness (dict "periodSeconds" 5 "timeoutSeconds" 5)) | nindent 4 }}
  {{- with $engine.lifecycle }}
  lifecycle:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  securityContext:
    {{- toYaml $engine.securityContext | nindent 4 }}
  {{- with $engine.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if or (ne $engine.type "sim") $engine.volumeMounts }}
  volumeMounts:
    {{- if ne $engine.type "sim" }}
    - {name: engine-home, mountPath: /home/engine}
    - {name: engine-shm, mountPath: /dev/shm}
    {{- end }}
    {{- with $engine.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
{{- end -}}

{{- /* A probe with what is given in place of its times and of its question: (list GIVEN TIMES). */ -}}
{{- define "kvbus.engineProbe" -}}
{{- $given := index . 0 -}}
{{- $asked := dict "httpGet" (dict "path" "/health" "port" "http") -}}
{{- range $how := list "httpGet" "exec" "tcpSocket" "grpc" -}}
{{- if hasKey $given $how -}}
{{- $asked = dict -}}
{{- end -}}
{{- end -}}
{{- merge (dict) $given (index . 1) $asked | toYaml -}}
{{- end -}}

{{- define "kvbus.engineStartup" -}}
{{- $times := dict "periodSeconds" 10 "failureThreshold" (max 1 (div (int .Values.engine.startupTimeoutSeconds) 10)) -}}
{{- include "kvbus.engineProbe" (list .Values.engine.probes.startup $times) -}}
{{- end -}}

{{- define "kvbus.engineImage" -}}
{{- $image := .Values.engine.image -}}
{{- $default := get (dict "vllm" "vllm/vllm-openai" "sglang" "lmsysorg/sglang") .Values.engine.type -}}
{{- $tag := get (dict "vllm" "v0.33.0" "sglang" "v0.5.23") .Values.engine.type -}}
{{- if eq .Values.engine.type "sim" -}}
{{ include "kvbus.image" . }}
{{- else if $image.digest -}}
{{ required "engine.image.repository is needed for engine.type=custom" ($image.repository | default $default) }}@{{ $image.digest }}
{{- else -}}
{{ required "engine.image.repository is needed for engine.type=custom" ($image.repository | default $default) }}:{{ $image.tag | default $tag }}
{{- end -}}
{{- end -}}

{{- define "kvbus.engineCommand" -}}
{{- $engine := .Values.engine -}}
{{- $name := include "kvbus.modelName" . -}}
{{- $ranks := int .Values.kvbus.dataParallelSize -}}
{{- $command := list -}}
{{- $args := list -}}
{{- if eq $engine.type "vllm" -}}
{{- $command = list "vllm" "serve" -}}
{{- $args = list .Values.model (printf "--served-model-name=%s" $name) (printf "--port=%s" (include "kvbus.enginePort" .)) "--enable-prefix-caching" -}}
{{- if .Values.kvbus.front -}}
{{- $args = append $args "--host=127.0.0.1" -}}
{{- end -}}
{{- if gt (int $engine.tensorParallelSize) 1 -}}
{{- $args = append $args (printf "--tensor-parallel-size=%d" (int $engine.tensorParallelSize)) -}}
{{- end -}}
{{- if gt $ranks 1 -}}
{{- $args = append $args (printf "--data-parallel-size=%d" $ranks) -}}
{{- end -}}
{{- $args = concat $args (list "--kv-events-config" (include "kvbus.kvEventsConfig" (list . "vllm"))) -}}
{{- else if eq $engine.type "sglang" -}}
{{- $command = list "python3" "-m" "sglang.launch_server" -}}
{{- $args = list (printf "--model-path=%s" .Values.model) (printf "--served-model-name=%s" $name) (printf "--host=%s" (ternary "127.0.0.1" "0.0.0.0" (not (empty .Values.kvbus.front)))) (printf "--port=%s" (include "kvbus.enginePort" .)) -}}
{{- if gt (int $engine.tensorParallelSize) 1 -}}
{{- $args = append $args (printf "--tp-size=%d" (int $engine.tensorParallelSize)) -}}
{{- end -}}
{{- if gt $ranks 1 -}}
{{- /* without DP attention every rank would publish on the first rank's port */ -}}
{{- $args = concat $args (list (printf "--dp-size=%d" $ranks) "--enable-dp-attention") -}}
{{- end -}}
{{- $args = concat $args (list "--kv-events-config" (include "kvbus.kvEventsConfig" (list . "sglang"))) -}}
{{- else if eq $engine.type "sim" -}}
{{- $events := include "kvbus.kvEventsConfig" (list . "vllm") | fromJson -}}
{{- $args = list "sim" (printf "--endpoint=%s" $events.endpoint) (printf "--replay-endpoint=%s" $events.replay_endpoint) (printf "--ranks=%d" $ranks) -}}
{{- end -}}
{{- with $engine.command | default $command -}}
command:
  {{- toYaml . | nindent 2 }}
{{ end -}}
{{- with concat ($engine.args | default $args) $engine.extraArgs -}}
args:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}
