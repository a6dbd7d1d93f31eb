{{- define "other.pod" -}}
metadata:
  labels: {app: {{ .Release.Name }}}
  annotations: {note: mine}
spec:
  initContainers:
    - {name: fetch, image: "fetch:1"}
  containers:
    - name: engine
      image: "engine:1"
      args: [--kv-events-config, {{ include "kvbus.kvEventsConfig" (list . "vllm") | quote }}]
  volumes:
    - {name: weights, emptyDir: {}}
{{- end -}}
