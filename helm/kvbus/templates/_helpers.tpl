{{- define "kvbus.name" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- /* Never changes over upgrades, not even with the mode. */ -}}
{{- define "kvbus.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvbus.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{ include "kvbus.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvbus.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "kvbus.name" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- /* "true" or nothing */ -}}
{{- define "kvbus.headless" -}}
{{- if kindIs "bool" .Values.service.headless -}}
{{- if .Values.service.headless }}true{{ end -}}
{{- else if and (ne .Values.mode "deployment") (eq .Values.service.type "ClusterIP") }}true{{ end -}}
{{- end -}}

{{- /* "true" or nothing: who may connect is restricted. */ -}}
{{- define "kvbus.policy" -}}
{{- if kindIs "bool" .Values.networkPolicy.enabled -}}
{{- if .Values.networkPolicy.enabled }}true{{ end -}}
{{- else if .Values.networkPolicy.routers }}true{{ end -}}
{{- end -}}

{{- /* "true" or nothing: several pods may run at once. How many an autoscaler wants is not known here. */ -}}
{{- define "kvbus.severalPods" -}}
{{- if or (eq .Values.mode "daemonset") (kindIs "invalid" .Values.replicas) (gt (int .Values.replicas) 1) }}true{{ end -}}
{{- end -}}

{{- /* What a schema cannot see, beyond the library's own check. */ -}}
{{- define "kvbus.refuse" -}}
{{- $v := .Values -}}
{{- $worker := eq $v.mode "worker" -}}
{{- /* all of the library's defaults are there where a tool does not know aliases (older `helm lint`); less is a user's mistake */ -}}
{{- $unaliased := get $v "kvbus-lib" | default dict -}}
{{- if and $unaliased (not (hasKey $unaliased "securityContext")) -}}
{{- fail "kvbus-lib: these values are found under kvbus" -}}
{{- end -}}
{{- if not $worker -}}
{{- if not $v.kvbus.config.sources -}}
{{- fail (printf "mode=%s needs kvbus.config.sources: the engines, for example [{name: a, endpoint: tcp://engine-a:5557, replay_endpoint: tcp://engine-a:5558}]" $v.mode) -}}
{{- end -}}
{{- if and (has $v.kvbus.router (list "llm-d" "aibrix")) (not $v.kvbus.config.outputs) -}}
{{- fail (printf "kvbus.router=%s takes the address of the engine's pod from the stream's: it needs mode=worker" $v.kvbus.router) -}}
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
{{- if and $several (not $logged) (eq $v.mode "deployment") (not (include "kvbus.headless" .)) -}}
{{- fail "mode=deployment with replicas > 1 or null (an autoscaler's number) needs service.headless=true: each pod numbers its own stream, and a router's subscription and replay must meet the same one (pods that read a log alone have one numbering)" -}}
{{- end -}}
{{- if and $v.kvbus.state.existingClaim $several -}}
{{- fail "kvbus.state.existingClaim: a state belongs to one kvbus; use it with replicas=1, not with null (an autoscaler's number), and not with mode=daemonset" -}}
{{- end -}}
{{- if and (ne $v.service.type "ClusterIP") (include "kvbus.headless" .) -}}
{{- fail (printf "service.type=%s has an address, and service.headless=true says that there is none" $v.service.type) -}}
{{- end -}}
{{- if and $several (not $logged) (ne $v.service.type "ClusterIP") -}}
{{- fail (printf "service.type=%s puts several pods behind one address: each numbers its own stream, and a router's subscription and replay must meet the same one; use it with replicas=1, not with null (an autoscaler's number) or mode=daemonset" $v.service.type) -}}
{{- end -}}
{{- range list "extraContainers" "extraInitContainers" -}}
{{- range get $v . -}}
{{- if has .name (list "kvbus" "engine" "index") -}}
{{- fail (printf "extraContainers, extraInitContainers: %s is the chart's own container" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $key, $_ := merge (dict) $v.commonLabels $v.service.labels -}}
{{- if or (hasPrefix "app.kubernetes.io/" $key) (hasPrefix "helm.sh/" $key) -}}
{{- fail (printf "commonLabels, service.labels: %s is the chart's own" $key) -}}
{{- end -}}
{{- end -}}
{{- if and $v.monitoring.podMonitor.enabled $v.monitoring.serviceMonitor.enabled -}}
{{- fail "monitoring.podMonitor and monitoring.serviceMonitor would scrape every pod twice: enable one of them" -}}
{{- end -}}
{{- if and $v.podDisruptionBudget.enabled (eq $v.mode "daemonset") -}}
{{- fail "podDisruptionBudget.enabled has no effect with mode=daemonset: a drain leaves its pods alone" -}}
{{- end -}}
{{- with $v.strategy -}}
{{- if has .type (ternary (list "Recreate") (list "OnDelete") (eq $v.mode "daemonset")) -}}
{{- fail (printf "strategy.type=%s: mode=%s has no such strategy" .type $v.mode) -}}
{{- end -}}
{{- end -}}
{{- range $key := list "app.kubernetes.io/name" "app.kubernetes.io/instance" -}}
{{- if hasKey $v.podLabels $key -}}
{{- fail (printf "podLabels: %s is how the chart finds its pods" $key) -}}
{{- end -}}
{{- end -}}
{{- if $worker -}}
{{- if and (eq $v.engine.type "custom") (not (or $v.engine.image.digest $v.engine.image.tag)) -}}
{{- fail "engine.type=custom needs engine.image.repository and engine.image.tag" -}}
{{- end -}}
{{- if and (eq $v.engine.type "sim") $v.engine.image.repository -}}
{{- fail "engine.type=sim runs kvbus's own image: set kvbus.image, not engine.image" -}}
{{- end -}}
{{- if and (eq $v.engine.type "sglang") (ne (mod (int $v.engine.tensorParallelSize) (int $v.kvbus.dataParallelSize)) 0) -}}
{{- fail (printf "engine.type=sglang: its ranks are those of DP attention, which share engine.tensorParallelSize GPUs; %d must be a multiple of kvbus.dataParallelSize=%d" (int $v.engine.tensorParallelSize) (int $v.kvbus.dataParallelSize)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
