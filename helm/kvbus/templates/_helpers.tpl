{{- define "kvbus.name" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- /* The selector labels. They never change in an upgrade, not even with the mode. */ -}}
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

{{- define "kvbus.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "kvbus.name" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- /* "true" if there are several pods, each with its own seqs, so that routers must address each pod; else empty. */ -}}
{{- define "kvbus.headless" -}}
{{- if eq .Values.service.type "ClusterIP" -}}
{{- if or (ne .Values.mode "deployment") (and (include "kvbus.severalPods" .) (not (include "kvbus.logged" .Values.kvbus.config.sources))) }}true{{ end -}}
{{- end -}}
{{- end -}}

{{- /* "true" if a NetworkPolicy restricts connections, else empty. */ -}}
{{- define "kvbus.policy" -}}
{{- if kindIs "bool" .Values.networkPolicy.enabled -}}
{{- if .Values.networkPolicy.enabled }}true{{ end -}}
{{- else if .Values.networkPolicy.routers }}true{{ end -}}
{{- end -}}

{{- /* "true" if several pods may run at once, as with an autoscaler; else empty. */ -}}
{{- define "kvbus.severalPods" -}}
{{- if or (eq .Values.mode "daemonset") (kindIs "invalid" .Values.replicas) (gt (int .Values.replicas) 1) }}true{{ end -}}
{{- end -}}

{{- /* "true" if the release has a test, else empty. */ -}}
{{- define "kvbus.tested" -}}
{{- if and (or .Values.helmTest.enabled (eq .Values.mode "simulation")) (not (include "kvbus.curveSecretName" .)) }}true{{ end -}}
{{- end -}}

{{- /* Refuse contradictions that neither a schema nor the library's check finds. */ -}}
{{- define "kvbus.refuse" -}}
{{- $v := .Values -}}
{{- $simulation := eq $v.mode "simulation" -}}
{{- /* older versions of `helm lint` ignore the alias and put all of the library's defaults here; only some of them are a mistake */ -}}
{{- $unaliased := get $v "kvbus-lib" | default dict -}}
{{- if and $unaliased (not (hasKey $unaliased "securityContext")) -}}
{{- fail "kvbus-lib: these values are found under kvbus" -}}
{{- end -}}
{{- if and $simulation $v.kvbus.config.sources -}}
{{- fail "kvbus.config.sources has no effect with mode=simulation: set mode=deployment to relay these engines" -}}
{{- end -}}
{{- if not $simulation -}}
{{- if not $v.kvbus.config.sources -}}
{{- fail (printf "mode=%s needs kvbus.config.sources: the engines, for example [{name: a, endpoint: tcp://engine-a:5557, replay_endpoint: tcp://engine-a:5558}]" $v.mode) -}}
{{- end -}}
{{- if and (has $v.kvbus.router (list "llm-d" "aibrix")) (not $v.kvbus.config.outputs) -}}
{{- fail (printf "kvbus.router=%s takes the address of the engine's pod from the stream's: put kvbus into that pod as a sidecar" $v.kvbus.router) -}}
{{- end -}}
{{- end -}}
{{- if $v.index.enabled -}}
{{- include "kvbus.refuseIndex" . -}}
{{- end -}}
{{- $several := include "kvbus.severalPods" . -}}
{{- $logged := include "kvbus.logged" $v.kvbus.config.sources -}}
{{- if and $logged $v.kvbus.state.enabled -}}
{{- fail "kvbus.state.enabled: what is read from a log has its state there; set it to false" -}}
{{- end -}}
{{- if and $v.kvbus.state.existingClaim $several -}}
{{- fail "kvbus.state.existingClaim: a state belongs to one kvbus; use it with replicas=1, not with null (an autoscaler's number), and not with mode=daemonset" -}}
{{- end -}}
{{- if and $several (not $logged) (ne $v.service.type "ClusterIP") -}}
{{- fail (printf "service.type=%s puts several pods behind one address: each numbers its own stream, and a router's subscription and replay must meet the same one; use it with replicas=1, not with null (an autoscaler's number) or mode=daemonset" $v.service.type) -}}
{{- end -}}
{{- if and $v.podDisruptionBudget.enabled (eq $v.mode "daemonset") -}}
{{- fail "podDisruptionBudget.enabled has no effect with mode=daemonset: a drain leaves its pods alone" -}}
{{- end -}}
{{- range $key := list "app.kubernetes.io/name" "app.kubernetes.io/instance" -}}
{{- if hasKey $v.podLabels $key -}}
{{- fail (printf "podLabels: %s is how the chart finds its pods" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
