{{- /* `kvbus index`, which follows the kvbus in its own pod. */ -}}
{{- define "kvbus.index" -}}
- name: index
  image: {{ include "kvbus.image" . }}
  imagePullPolicy: {{ .Values.kvbus.image.pullPolicy }}
  args:
    - index
    - http://127.0.0.1:{{ .Values.kvbus.ports.http }}
    - --listen=0.0.0.0:{{ .Values.index.port }}
    {{- if .Values.kvbus.http.tokensSecret }}
    - --tokens-file=/etc/kvbus-http/tokens/tokens
    {{- end }}
  ports:
    - {name: kvbus-index, containerPort: {{ .Values.index.port }}}
  livenessProbe:
    httpGet: {path: /livez, port: kvbus-index}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    httpGet: {path: /readyz, port: kvbus-index}
    periodSeconds: 5
    timeoutSeconds: 5
  securityContext:
    {{- include "kvbus.securityContext" (list . .Values.kvbus.securityContext) | nindent 4 }}
  resources:
    {{- toYaml .Values.kvbus.resources | nindent 4 }}
  {{- if .Values.kvbus.http.tokensSecret }}
  volumeMounts:
    - {name: kvbus-http-tokens, mountPath: /etc/kvbus-http/tokens, readOnly: true}
  {{- end }}
{{- end -}}

{{- /* Refuse contradictions of the index with other values. Each message names the value to change. */ -}}
{{- define "kvbus.refuseIndex" -}}
{{- $v := .Values -}}
{{- if eq $v.mode "simulation" -}}
{{- fail "index.enabled: the index is a container beside an aggregator; set mode to deployment or daemonset" -}}
{{- end -}}
{{- if include "kvbus.tls" . -}}
{{- fail "index.enabled: the index asks kvbus on 127.0.0.1, which no certificate of kvbus.http.tlsSecret names; run `kvbus index` in a pod of its own" -}}
{{- end -}}
{{- if include "kvbus.curveSecretName" . -}}
{{- fail "index.enabled: the outputs require CURVE, and the index has no key of its own; run `kvbus index` in a pod of its own, with its key" -}}
{{- end -}}
{{- range (include "kvbus.claims" . | fromJson).claims -}}
{{- if eq (int .port) (int $v.index.port) -}}
{{- fail (printf "index.port and %s both need port %d" .key (int .port)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
