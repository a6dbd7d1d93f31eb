{{- /* The pod template of every mode, kvbus included. */ -}}
{{- define "kvbus.podTemplate" -}}
{{- include "kvbus.refuse" . -}}
{{- if eq .Values.mode "worker" -}}
{{- include "kvbus.pod" (list . (include "kvbus.bare" .)) -}}
{{- else -}}
{{- include "kvbus.pod" (list . (include "kvbus.bare" .) "alone") -}}
{{- end -}}
{{- end -}}

{{- /* The same without kvbus. */ -}}
{{- define "kvbus.bare" -}}
{{- $engine := and (eq .Values.mode "worker") (ne .Values.engine.type "sim") -}}
metadata:
  labels:
    {{- /* nothing that changes with a release of the chart: an engine is too dear to restart for a label */}}
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
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  securityContext:
    {{- include "kvbus.securityContext" (list . .Values.podSecurityContext) | nindent 4 }}
  {{- range $key := list "imagePullSecrets" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
  {{- with get $.Values $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with .Values.extraInitContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if or (eq .Values.mode "worker") .Values.extraContainers .Values.index.enabled }}
  containers:
    {{- if eq .Values.mode "worker" }}
    {{- include "kvbus.engine" . | nindent 4 }}
    {{- end }}
    {{- with .Values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if .Values.index.enabled }}
    {{- include "kvbus.index" . | nindent 4 }}
    {{- end }}
  {{- else }}
  containers: []
  {{- end }}
  {{- if or $engine .Values.volumes }}
  volumes:
    {{- if $engine }}
    - name: engine-home
      {{- if .Values.engine.home.existingClaim }}
      persistentVolumeClaim: {claimName: {{ .Values.engine.home.existingClaim }}}
      {{- else if .Values.engine.home.sizeLimit }}
      emptyDir: {sizeLimit: {{ .Values.engine.home.sizeLimit }}}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: engine-shm
      emptyDir: {medium: Memory, sizeLimit: {{ .Values.engine.sharedMemory }}}
    {{- end }}
    {{- with .Values.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
{{- end -}}
