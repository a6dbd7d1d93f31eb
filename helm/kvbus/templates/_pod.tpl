{{- /* The pod template of every mode, with kvbus. */ -}}
{{- define "kvbus.podTemplate" -}}
{{- include "kvbus.refuse" . -}}
{{- if eq .Values.mode "simulation" -}}
{{- include "kvbus.pod" (list . (include "kvbus.bare" .)) -}}
{{- else -}}
{{- include "kvbus.pod" (list . (include "kvbus.bare" .) "alone") -}}
{{- end -}}
{{- end -}}

{{- /* The pod template without kvbus. */ -}}
{{- define "kvbus.bare" -}}
metadata:
  labels:
    {{- /* no label that changes with the chart's version, because it would restart the pods */}}
    {{- include "kvbus.selector" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "kvbus.serviceAccountName" . }}
  {{- /* only discovery in Kubernetes uses the API */}}
  automountServiceAccountToken: {{ ne (include "kvbus.watched" .) "[]" }}
  enableServiceLinks: false
  securityContext:
    {{- include "kvbus.podSecurity" . | nindent 4 }}
  {{- range $key := list "imagePullSecrets" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" }}
  {{- with get $.Values $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- if eq .Values.mode "simulation" }}
  containers:
    {{- include "kvbus.engine" . | nindent 4 }}
  {{- else if .Values.index.enabled }}
  containers:
    {{- include "kvbus.index" . | nindent 4 }}
  {{- else }}
  containers: []
  {{- end }}
{{- end -}}

{{- /* Restricted Pod Security Standard. The group lets kvbus read its Secrets and write its claim. */ -}}
{{- define "kvbus.podSecurity" -}}
{{- $user := dict "runAsNonRoot" true "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532 "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- include "kvbus.securityContext" (list . $user) -}}
{{- end -}}
