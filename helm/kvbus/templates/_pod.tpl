{{- /* The pod template of every mode, kvbus included. */ -}}
{{- define "kvbus.podTemplate" -}}
{{- include "kvbus.refuse" . -}}
{{- if eq .Values.mode "simulation" -}}
{{- include "kvbus.pod" (list . (include "kvbus.bare" .)) -}}
{{- else -}}
{{- include "kvbus.pod" (list . (include "kvbus.bare" .) "alone") -}}
{{- end -}}
{{- end -}}

{{- /* The same without kvbus. */ -}}
{{- define "kvbus.bare" -}}
metadata:
  labels:
    {{- /* nothing that changes with a release of the chart: a label must restart no pod */}}
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
  {{- /* only discovery in Kubernetes asks the API */}}
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

{{- /* Restricted Pod Security Standard. Through the group kvbus reads its Secrets and writes its claim. */ -}}
{{- define "kvbus.podSecurity" -}}
{{- $user := dict "runAsNonRoot" true "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532 "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- include "kvbus.securityContext" (list . $user) -}}
{{- end -}}
