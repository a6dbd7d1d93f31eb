{{- /*
kvbus as an element of a pod's initContainers:

  initContainers:
    {{- include "kvbus.sidecar" . | nindent 4 }}
  volumes:
    {{- include "kvbus.volumes" . | nindent 4 }}
*/ -}}
{{- define "kvbus.sidecar" -}}
{{- include "kvbus.container" (dict "root" . "native" true) -}}
{{- end -}}

{{- /*
All three probes only check kvbus itself. A sidecar's readiness is part of the pod's, and the engine starts after the sidecar's
startup probe. None of the probes may therefore depend on the engine or on the health of its stream.
*/ -}}
{{- define "kvbus.container" -}}
{{- $root := .root -}}
{{- $v := $root.Values.kvbus -}}
{{- $get := dict "port" "kvbus-http" -}}
{{- if include "kvbus.tls" $root -}}
{{- $_ := set $get "scheme" "HTTPS" -}}
{{- end -}}
{{- $live := dict "httpGet" (merge (dict "path" "/livez") $get) -}}
{{- $ready := dict "httpGet" (merge (dict "path" "/readyz") $get) -}}
- name: kvbus
  image: {{ include "kvbus.image" $root }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  {{- if .native }}
  restartPolicy: Always
  {{- end }}
  {{- if eq $v.configFrom "configMap" }}
  args: [run, /etc/kvbus/kvbus.yaml]
  {{- else }}
  args: [run]
  {{- end }}
  {{- with include "kvbus.env" $root }}
  env:
    {{- . | trim | nindent 4 }}
  {{- end }}
  ports:
    {{- include "kvbus.ports" $root | trim | nindent 4 }}
  # every second, because the engine waits for it; after a restart, kvbus loads its state before it binds a port
  startupProbe:
    {{- merge (dict "periodSeconds" 1 "failureThreshold" 300) $live | toYaml | nindent 4 }}
  livenessProbe:
    {{- merge (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6) $live | toYaml | nindent 4 }}
  readinessProbe:
    {{- merge (dict "periodSeconds" 5 "timeoutSeconds" 5) $ready | toYaml | nindent 4 }}
  securityContext:
    {{- include "kvbus.securityContext" (list $root $v.securityContext) | nindent 4 }}
  {{- with $v.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "kvbus.volumeMounts" $root | trim }}
  volumeMounts:
    {{- . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- /* Not empty if the HTTP port speaks TLS. */ -}}
{{- define "kvbus.tls" -}}
{{- (include "kvbus.config" . | fromJson).http_tls_certificate_file | default "" -}}
{{- end -}}

{{- /* A security context, without the users and groups that the platform sets if platformUser is true: (list . CONTEXT). */ -}}
{{- define "kvbus.securityContext" -}}
{{- $context := index . 1 -}}
{{- if (index . 0).Values.kvbus.platformUser -}}
{{- $context = omit $context "runAsUser" "runAsGroup" "fsGroup" -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{- define "kvbus.image" -}}
{{- $image := .Values.kvbus.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default "0.1.0" }}
{{- end -}}
{{- end -}}

{{- define "kvbus.env" -}}
{{- $v := .Values.kvbus -}}
{{- $variables := include "kvbus.config.variables" . | fromJson -}}
{{- $text := toJson $variables -}}
{{- $downward := dict "POD_NAME" "metadata.name" "POD_NAMESPACE" "metadata.namespace" "POD_IP" "status.podIP" "NODE_NAME" "spec.nodeName" "HOST_IP" "status.hostIP" -}}
{{- $given := list -}}
{{- range $v.env -}}
{{- $given = append $given .name -}}
{{- end -}}
{{- range regexFindAll "\\$\\([^)]*\\)" $text -1 -}}
{{- $name := trimSuffix ")" (trimPrefix "$(" .) -}}
{{- if not (or (hasKey $downward $name) (has $name $given)) -}}
{{- fail (printf "kvbus.config: nothing fills in %s; known are $(POD_NAME), $(POD_NAMESPACE), $(POD_IP), $(NODE_NAME), $(HOST_IP) and what kvbus.env defines" .) -}}
{{- end -}}
{{- end -}}
{{- range $name, $path := $downward -}}
{{- if and (contains (printf "$(%s)" $name) $text) (not (has $name $given)) }}
- name: {{ $name }}
  valueFrom: {fieldRef: {fieldPath: {{ $path }}}}
{{- end -}}
{{- end -}}
{{- with $v.env }}
{{ toYaml . }}
{{- end -}}
{{- range $key, $value := $variables }}
- name: KVBUS_{{ upper $key }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end -}}
{{- end -}}
