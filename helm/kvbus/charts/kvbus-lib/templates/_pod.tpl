{{- /*
A complete pod template that includes kvbus: container, volumes, labels, annotations. Use it in a workload as follows. "my.pod"
is your template with the previous content of `template:`.

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
{{- /* first, because kvbus needs no other init container; the engine starts after all of them */ -}}
{{- $sidecar := include "kvbus.sidecar" $root | fromYamlArray -}}
{{- $_ := set $pod.spec "initContainers" (concat $sidecar ($pod.spec.initContainers | default list)) -}}
{{- end -}}
{{- with include "kvbus.volumes" $root | fromYamlArray -}}
{{- $_ := set $pod.spec "volumes" (concat ($pod.spec.volumes | default list) .) -}}
{{- end -}}
{{- toYaml $pod -}}
{{- end -}}

{{- /* The labels by which monitors and routers find the pods. */ -}}
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

{{- /* Some changes of the configuration need a restart, so a changed ConfigMap changes the pod. */ -}}
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
  # kvbus refuses a key that other users may read, and reads it as a member of the pod's fsGroup
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

{{- /* The Secrets of kvbus.http, by the name of the mount, as JSON. */ -}}
{{- define "kvbus.httpSecrets" -}}
{{- $found := dict -}}
{{- range $mount, $value := dict "tls" "tlsSecret" "tokens" "tokensSecret" -}}
{{- with get $.Values.kvbus.http $value -}}
{{- $_ := set $found $mount . -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- /* The name of kvbus's objects in this release. */ -}}
{{- define "kvbus.resourceName" -}}
{{- printf "%s-kvbus" (.Values.fullnameOverride | default .Release.Name | trunc 52 | trimSuffix "-") -}}
{{- end -}}

{{- define "kvbus.curveSecretName" -}}
{{- .Values.kvbus.curve.existingSecret -}}
{{- end -}}

{{- /* The labels of kvbus.configMap, the manifest for kvbus.configFrom=configMap. */ -}}
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
