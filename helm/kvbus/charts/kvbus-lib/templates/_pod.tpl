{{- /*
A whole pod template with kvbus in it: container, volumes, labels, annotations. One line in a workload, where "my.pod" is
your template of what used to stand under `template:`.

  template:
    {{- include "kvbus.pod" (list . (include "my.pod" .)) | nindent 4 }}

kvbus is a native sidecar. A third element "alone" makes it an ordinary container, for a pod without an engine.
*/ -}}
{{- define "kvbus.pod" -}}
{{- $root := index . 0 -}}
{{- $pod := index . 1 | fromYaml -}}
{{- if not (kindIs "map" $pod.spec) -}}
{{- fail (printf "kvbus.pod: the second argument must be a pod template in YAML, with metadata and spec: %s" ($pod.Error | default "it has no spec")) -}}
{{- end -}}
{{- $metadata := $pod.metadata | default dict -}}
{{- $labels := merge (include "kvbus.podLabels" $root | fromYaml) ($metadata.labels | default dict) -}}
{{- $_ := set $metadata "labels" $labels -}}
{{- with include "kvbus.podAnnotations" $root | fromYaml -}}
{{- $_ := set $metadata "annotations" (merge . ($metadata.annotations | default dict)) -}}
{{- end -}}
{{- $_ := set $pod "metadata" $metadata -}}
{{- if has "alone" . -}}
{{- $container := include "kvbus.container" (dict "root" $root "native" false) | fromYamlArray -}}
{{- $_ := set $pod.spec "containers" (concat $pod.spec.containers $container) -}}
{{- else -}}
{{- /* first: kvbus waits for no other init container, and the engine starts after all of them */ -}}
{{- $sidecar := include "kvbus.sidecar" $root | fromYamlArray -}}
{{- $_ := set $pod.spec "initContainers" (concat $sidecar ($pod.spec.initContainers | default list)) -}}
{{- end -}}
{{- with include "kvbus.volumes" $root | fromYamlArray -}}
{{- $_ := set $pod.spec "volumes" (concat ($pod.spec.volumes | default list) .) -}}
{{- end -}}
{{- toYaml $pod -}}
{{- end -}}

{{- /* By these labels monitors and routers find the pods. */ -}}
{{- define "kvbus.podLabels" -}}
kvbus/sidecar: "true"
{{- if eq .Values.kvbus.router "llm-d" }}
llm-d.ai/inference-serving: "true"
{{- else if eq .Values.kvbus.router "aibrix" }}
model.aibrix.ai/name: {{ include "kvbus.modelName" . | quote }}
model.aibrix.ai/port: {{ .Values.kvbus.servingPort | quote }}
model.aibrix.ai/kv-events-enabled: "true"
{{- end }}
{{- end -}}

{{- /* Some changes need another process: a changed ConfigMap is a changed pod. */ -}}
{{- define "kvbus.podAnnotations" -}}
{{- if eq .Values.kvbus.configFrom "configMap" -}}
checksum/kvbus-config: {{ include "kvbus.config.file" . | sha256sum }}
{{- end -}}
{{- end -}}

{{- define "kvbus.volumeMounts" -}}
{{- if eq .Values.kvbus.configFrom "configMap" }}
- {name: kvbus-config, mountPath: /etc/kvbus, readOnly: true}
{{- end }}
{{- if .Values.kvbus.state.enabled }}
- {name: kvbus-state, mountPath: /var/lib/kvbus}
{{- end }}
{{- if include "kvbus.curveSecretName" . }}
- {name: kvbus-curve, mountPath: /etc/kvbus-curve, readOnly: true}
{{- end }}
{{- range $mount, $secret := include "kvbus.httpSecrets" . | fromJson }}
- {name: kvbus-http-{{ $mount }}, mountPath: /etc/kvbus-http/{{ $mount }}, readOnly: true}
{{- end }}
{{- with .Values.kvbus.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvbus.volumes" -}}
{{- if eq .Values.kvbus.configFrom "configMap" }}
- name: kvbus-config
  configMap: {name: {{ include "kvbus.resourceName" . }}}
{{- end }}
{{- if .Values.kvbus.state.existingClaim }}
- name: kvbus-state
  persistentVolumeClaim: {claimName: {{ .Values.kvbus.state.existingClaim }}}
{{- else if .Values.kvbus.state.enabled }}
- name: kvbus-state
  emptyDir: {sizeLimit: {{ .Values.kvbus.state.sizeLimit }}}
{{- end }}
{{- with include "kvbus.curveSecretName" . }}
- name: kvbus-curve
  # kvbus refuses a key that others may read; it is in the pod's fsGroup
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- range $mount, $secret := include "kvbus.httpSecrets" . | fromJson }}
- name: kvbus-http-{{ $mount }}
  secret: {secretName: {{ $secret }}, defaultMode: 0440}
{{- end }}
{{- with .Values.kvbus.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The Secrets of kvbus.http by the names of their mounts, as JSON. */ -}}
{{- define "kvbus.httpSecrets" -}}
{{- $found := dict -}}
{{- range $mount, $value := dict "tls" "tlsSecret" "tokens" "tokensSecret" -}}
{{- with get $.Values.kvbus.http $value -}}
{{- $_ := set $found $mount . -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- /* Name of what belongs to kvbus in this release. */ -}}
{{- define "kvbus.resourceName" -}}
{{- printf "%s-kvbus" (.Values.fullnameOverride | default .Release.Name | trunc 52 | trimSuffix "-") -}}
{{- end -}}

{{- define "kvbus.curveSecretName" -}}
{{- .Values.kvbus.curve.existingSecret -}}
{{- end -}}

{{- /* The manifest for kvbus.configFrom=configMap. */ -}}
{{- define "kvbus.objectLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "kvbus.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "kvbus.resourceName" . }}
  labels:
    {{- include "kvbus.objectLabels" . | nindent 4 }}
data:
  kvbus.yaml: |
    {{- include "kvbus.config.file" . | nindent 4 }}
{{- end -}}
