{{- /* The simulated engine, which runs kvbus's image. Its event ports are on loopback and therefore not listed. */ -}}
{{- define "kvbus.engine" -}}
{{- $events := include "kvbus.kvEventsConfig" (list . "vllm") | fromJson -}}
- name: engine
  image: {{ include "kvbus.image" . }}
  imagePullPolicy: {{ .Values.kvbus.image.pullPolicy }}
  args:
    - sim
    - --endpoint={{ $events.endpoint }}
    - --replay-endpoint={{ $events.replay_endpoint }}
    - --ranks={{ .Values.kvbus.dataParallelSize }}
  securityContext:
    {{- include "kvbus.securityContext" (list . .Values.kvbus.securityContext) | nindent 4 }}
  resources:
    {{- toYaml .Values.kvbus.resources | nindent 4 }}
{{- end -}}
